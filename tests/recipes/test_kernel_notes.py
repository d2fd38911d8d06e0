"""A rule for matrices that only averages a convolutional network says so."""

from __future__ import annotations

import pytest
import torch

from merganser.checkpoints.memory import StateDict
from merganser.recipes import load, prepare

CONVOLUTIONAL = {"conv.weight": (8, 4, 3, 3), "head.weight": (4, 8)}
TRANSFORMER = {"patches.weight": (8, 3, 2, 2), "layers.weight": (64, 64)}


def notes(shapes: dict[str, tuple[int, ...]], **parameters: object) -> tuple[str, ...]:
    models = {name: StateDict({k: torch.randn(s) for k, s in shapes.items()}, name) for name in ("base", "a", "b")}
    document = {"method": "tsv", "base": "base", "models": ["a", "b"], "parameters": parameters}
    return prepare(load(document), models.__getitem__).plan.notes


def test_averaged_kernels_are_named() -> None:
    (note,) = notes(CONVOLUTIONAL)
    assert note == (
        "tsv averages 1 convolution kernels (90% of the merged entries): "
        "set `convolutions: true` to treat them as matrices"
    )


@pytest.mark.parametrize(("shapes", "parameters"), [(CONVOLUTIONAL, {"convolutions": True}), (TRANSFORMER, {})])
def test_nothing_is_said_where_nothing_is_lost(shapes: dict[str, tuple[int, ...]], parameters: dict[str, bool]) -> None:
    assert notes(shapes, **parameters) == ()
