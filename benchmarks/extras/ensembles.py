"""Ensembles sampled in the universe, against the models themselves and against samples between unmatched models."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from benchmarks.single_task import loaded, unmoved
from benchmarks.zoo.images import Split
from merganser import align


def table(
    found: align.Universe, module: nn.Module, batches: Sequence[Tensor], test: Split, samples: int = 5
) -> dict[str, dict[str, float]]:
    """Accuracy, and the number of networks that run for it; every merge as it is and after REPAIR on the batches."""
    models = [loaded(module, state) for state in found.models]
    rows = {
        "single models": (statistics.mean(accuracy(model, test) for model in models), 1),
        "ensemble of the models": (accuracy(together(models), test), len(models)),
    }
    for name, place in {"of the universe": found, "without matching": unmoved(models, found.symmetry)}.items():
        merged = loaded(module, place.merged())
        ends = [place.to_universe(i) for i in range(len(place))]
        rows[f"mean {name}"] = (accuracy(merged, test), 1)
        rows[f"mean {name}, REPAIR"] = (accuracy(align.repair(merged, ends, batches), test), 1)
        for way, seen in (("", None), (", REPAIR", batches)):
            drawn = align.ensemble(module, place, samples=samples, batches=seen)
            rows[f"{samples} samples {name}{way}"] = (accuracy(drawn, test), samples)
    return {name: {"accuracy": value, "networks": float(count)} for name, (value, count) in rows.items()}


def together(models: Sequence[nn.Module]) -> nn.Module:
    """The mean of the models' probabilities."""
    return align.UniverseEnsemble(list(models), lambda logits: torch.as_tensor(logits).softmax(dim=-1)).eval()


@torch.no_grad()
def accuracy(model: nn.Module, test: Split) -> float:
    return sum(int((model(images).argmax(1) == labels).sum()) for images, labels in test.batches(100)) / len(test)
