"""Ensembles sampled in the universe, against the models themselves and against samples between unmatched models."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch
from torch import nn

from benchmarks.single_task import loaded, unmoved
from benchmarks.zoo.images import Split
from merganser import align


def table(found: align.Universe, module: nn.Module, test: Split, samples: int = 5) -> dict[str, dict[str, float]]:
    """Accuracy, and the number of networks that run for it."""
    models = [loaded(module, state) for state in found.models]
    apart = unmoved(models, found.symmetry)
    rows = {
        "single models": (statistics.mean(accuracy(model, test) for model in models), 1),
        "ensemble of the models": (accuracy(together(models), test), len(models)),
        "mean in the universe": (accuracy(loaded(module, found.merged()), test), 1),
        f"{samples} samples of the universe": (accuracy(align.ensemble(module, found, samples=samples), test), samples),
        f"{samples} samples without matching": (
            accuracy(align.ensemble(module, apart, samples=samples), test),
            samples,
        ),
    }
    return {name: {"accuracy": value, "networks": float(count)} for name, (value, count) in rows.items()}


def together(models: Sequence[nn.Module]) -> nn.Module:
    """The mean of the models' probabilities."""
    return align.UniverseEnsemble(list(models), lambda logits: torch.as_tensor(logits).softmax(dim=-1)).eval()


@torch.no_grad()
def accuracy(model: nn.Module, test: Split) -> float:
    return sum(int((model(images).argmax(1) == labels).sum()) for images, labels in test.batches()) / len(test)
