"""Evaluate merged models: check that they are sound, score them, and compare them with their parents."""

from __future__ import annotations

from typing import TYPE_CHECKING

from merganser.lazy import exports

__getattr__, __dir__, __all__ = exports(
    __name__,
    {
        "accuracy": ("normalized_accuracy",),
        "models": ("Evaluation", "evaluate"),
        "tasks": ("Task",),
        "temperatures": ("fit_temperature",),
        "verdicts": ("Check",),
    },
)

if TYPE_CHECKING:
    from merganser.evaluate.accuracy import normalized_accuracy as normalized_accuracy
    from merganser.evaluate.models import Evaluation as Evaluation
    from merganser.evaluate.models import evaluate as evaluate
    from merganser.evaluate.tasks import Task as Task
    from merganser.evaluate.temperatures import fit_temperature as fit_temperature
    from merganser.evaluate.verdicts import Check as Check
