"""Scoring: is a merged model sound, how well does it do, and how much of its parents' skill is left."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_NAMES = {
    "Check": "merganser.evaluate.verdicts",
    "Evaluation": "merganser.evaluate.models",
    "Task": "merganser.evaluate.tasks",
    "evaluate": "merganser.evaluate.models",
    "normalized_accuracy": "merganser.evaluate.accuracy",
}

__all__ = [*_NAMES]

if TYPE_CHECKING:
    from merganser.evaluate.accuracy import normalized_accuracy as normalized_accuracy
    from merganser.evaluate.models import Evaluation as Evaluation
    from merganser.evaluate.models import evaluate as evaluate
    from merganser.evaluate.tasks import Task as Task
    from merganser.evaluate.verdicts import Check as Check


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        return getattr(import_module(_NAMES[name]), name)
    raise AttributeError(f"module 'merganser.evaluate' has no attribute {name!r}")
