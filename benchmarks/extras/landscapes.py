"""The way between two networks before and after matching, and how alike networks are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.zoo.images import Split
from merganser import align
from merganser.align.state import State, state_of
from merganser.analysis import landscape, similarity


def barriers(
    models: Sequence[nn.Module],
    symmetry: align.Symmetry,
    test: Split,
    fresh: Sequence[Tensor] = (),
    points: int = 11,
) -> dict[str, dict[str, Any]]:
    """Loss and accuracy from the first model to the second: as trained, matched by weights, in the universe.

    With `fresh` batches every way is walked a second time with BatchNorm statistics recomputed at each point.
    """
    first, second = models[:2]
    found = align.universe([first, second], symmetry)
    ends: dict[str, tuple[State, State]] = {
        "as trained": (state_of(first), state_of(second)),
        "weight matching": (
            state_of(first),
            align.match(first, second, symmetry, start="identity", tries=1).apply(second),
        ),
        "C²M³": (found.to_universe(0), found.to_universe(1)),
    }

    def renewed(module: nn.Module) -> nn.Module:
        return align.reset_batch_norm(module, fresh)

    curves = {}
    batches = list(test.batches(100))
    for name, (a, b) in ends.items():
        for prepare in (None, renewed) if fresh else (None,):
            segment = landscape.segment(first, a, b, batches, F.cross_entropy, points=points, prepare=prepare)
            curves[name if prepare is None else f"{name}, statistics recomputed"] = curve(segment)
    return curves


def planes(
    models: Sequence[nn.Module], symmetry: align.Symmetry, test: Split, resolution: int = 13
) -> dict[str, dict[str, Any]]:
    """Accuracy over the plane through three models, as trained and in the universe."""
    found = align.universe(models[:3], symmetry)
    corners = {"as trained": found.models, "C²M³": [found.to_universe(i) for i in range(3)]}
    batches = list(test.batches(500))
    drawn = {}
    for name, states in corners.items():
        plane = landscape.plane(models[0], states, batches, F.cross_entropy, resolution=resolution)
        drawn[name] = {
            "xs": list(plane.xs),
            "ys": list(plane.ys),
            "accuracies": [list(row) for row in plane.accuracies],
            "corners": [list(corner) for corner in plane.anchors],
        }
    return drawn


def curve(segment: landscape.Segment) -> dict[str, Any]:
    """A segment as a row: the barrier, the worst accuracy, and the curves."""
    accuracies = [a for a in segment.accuracies if a is not None]
    return {
        "barrier": segment.barrier,
        "lowest_accuracy": min(accuracies),
        "midpoint_accuracy": accuracies[len(accuracies) // 2],
        "positions": list(segment.positions),
        "losses": list(segment.losses),
        "accuracies": accuracies,
    }


def likeness(found: align.Universe, module: nn.Module, layer: str, test: Split) -> dict[str, dict[str, float]]:
    """Means over pairs, before and after: cosine and distance of weights, CKA and distance of a layer's outputs."""
    names = [f"seed {i}" for i in range(len(found))]
    before = dict(zip(names, found.models, strict=True))
    after = {name: found.to_universe(i) for i, name in enumerate(names)}
    inputs = [images for images, _ in test.batches()]
    of_weights = similarity.before_after(similarity.weight_similarity(before), similarity.weight_similarity(after))
    of_outputs = similarity.before_after(
        similarity.representation_similarity(module, before, inputs, layer),
        similarity.representation_similarity(module, after, inputs, layer),
    )
    return {
        "before": _row(of_weights.before, of_outputs.before),
        "after": _row(of_weights.after, of_outputs.after),
    }


def _row(weights: Mapping[str, float], outputs: Mapping[str, float]) -> dict[str, float]:
    return {f"weight_{k}": v for k, v in weights.items()} | {f"output_{k}": v for k, v in outputs.items()}
