"""A task vector learned on one base, brought to another base of the same architecture."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.single_task import loaded
from benchmarks.zoo.images import Split, training_batches
from benchmarks.zoo.vision import evaluate
from merganser import align
from merganser.align.permutations import identity


def rotated(split: Split) -> Split:
    """The same images turned by a quarter."""
    return Split(split.images.rot90(1, (1, 2)).contiguous(), split.labels, split.mean, split.std)


def finetune(base: nn.Module, split: Split, seed: int, epochs: int = 1, rate: float = 0.02) -> nn.Module:
    """SGD with momentum at a small constant rate, so that the task vector is one of fine-tuning."""
    model = copy.deepcopy(base).train()
    optimiser = torch.optim.SGD(model.parameters(), rate, momentum=0.9)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for images, labels in training_batches(split, 128, generator, augment=False):
            optimiser.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimiser.step()
    return model.eval()


def table(
    source: nn.Module,
    target: nn.Module,
    symmetry: align.Symmetry,
    tasks: Mapping[str, tuple[Split, Split]],
    old: Split,
    seed: int = 0,
    scales: tuple[float, ...] = (0.5, 1.0),
) -> dict[str, dict[str, float]]:
    """Accuracy on the new task and the old one of the target with the source's task vector, moved in several ways."""
    matches = {
        "not matched": identity(symmetry),
        "weight matching": align.match(target, source, symmetry, start="identity", tries=1).permutations,
        "Frank-Wolfe": align.match(target, source, symmetry, method="frank_wolfe").permutations,
    }
    rows = {}
    for task, (train, test) in tasks.items():
        tuned = finetune(source, train, seed)
        rows[f"{task}: target itself"] = _row(target, test, old)
        rows[f"{task}: source fine-tuned"] = _row(tuned, test, old)
        rows[f"{task}: target fine-tuned"] = _row(finetune(target, train, seed), test, old)
        for name, permutations in matches.items():
            for scale in scales:
                state = align.transport(tuned, source, target, symmetry, scale=scale, alignment=permutations)
                rows[f"{task}: {name}, scale {scale:g}"] = _row(loaded(target, state), test, old)
    return rows


def _row(model: nn.Module, new: Split, old: Split) -> dict[str, float]:
    return {"new_task": evaluate(model, new)[0], "old_task": evaluate(model, old)[0]}
