"""Loss and accuracy along segments and over planes between models, and the loss barrier."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from merganser.analysis.inner_products import finite_products
from merganser.errors import InputError
from merganser.modules.batches import Batch, require_several, require_targets, reusable
from merganser.modules.functional import (
    LossFunction,
    Prepare,
    Weights,
    check_state,
    combine,
    evaluation_copy,
    prepare_module,
    run,
    weights_of,
)
from merganser.notebooks import Shown
from merganser.plain import Result


@dataclass(frozen=True)
class Score(Result):
    """Mean loss over all samples, and accuracy where targets are classes (else None)."""

    loss: float
    accuracy: float | None


@dataclass(frozen=True)
class Segment(Shown, Result):
    """Scores at (1 − λ)θ_A + λθ_B for λ in `positions`, from A to B.

    - `barrier`: max_λ L − ½(L_A + L_B), the thesis' definition. It assumes L_A ≈ L_B: otherwise it is at least ½|L_A −
      L_B|, whatever is in between.
    - `barrier_above_chord`: max_λ [L(λ) − (1 − λ)L_A − λL_B], zero when the path never rises above the chord.
    """

    positions: tuple[float, ...]
    losses: tuple[float, ...]
    accuracies: tuple[float | None, ...]
    barrier: float
    barrier_above_chord: float


@dataclass(frozen=True)
class Plane(Shown, Result):
    """Scores over the plane through three models; `losses[i][j]` at (`xs[j]`, `ys[i]`), axes in weight distance.

    The first model is the origin, the second lies on the x axis, the third above it; `anchors` are their coordinates.
    """

    xs: tuple[float, ...]
    ys: tuple[float, ...]
    losses: tuple[tuple[float, ...], ...]
    accuracies: tuple[tuple[float | None, ...], ...]
    anchors: tuple[tuple[float, float], tuple[float, float], tuple[float, float]]


def score(module: nn.Module, batches: Iterable[Batch], loss: LossFunction) -> Score:
    """Score `module` in its current mode on labelled batches.

    Args:
        module: The network.
        batches: Labelled batches `(inputs, targets)`.
        loss: The mean loss of outputs and targets.
    """
    total, hits, count, asked = 0.0, 0, 0, 0
    with torch.no_grad():
        for inputs, targets in (require_targets(batch, "batches") for batch in require_several(batches, "batches")):
            outputs = run(module, inputs)
            size = targets.shape[0]
            total += float(loss(outputs, targets)) * size
            count += size
            if not targets.is_floating_point() and outputs.shape[:-1] == targets.shape:
                hits += int((outputs.argmax(-1) == targets).sum())
                asked += targets.numel()
    if not count:
        raise InputError("no batches to score on (an exhausted iterator?)")
    return Score(total / count, hits / asked if asked else None)


def segment(
    module: nn.Module,
    first: nn.Module | Weights,
    second: nn.Module | Weights,
    batches: Iterable[Batch],
    loss: LossFunction,
    *,
    points: int | Sequence[float] = 11,
    prepare: Prepare | None = None,
) -> Segment:
    """Score along the segment between two state dicts of `module`, or two such modules.

    Args:
        module: The network; it is not changed.
        first: The weights at λ = 0, or a module that has them.
        second: The weights at λ = 1.
        batches: Labelled batches `(inputs, targets)`.
        loss: The mean loss of outputs and targets.
        points: The number of points, or the λ in [0, 1].
        prepare: Applied to the merged module before it is scored, such as REPAIR or recomputed statistics.
    """
    positions = [float(x) for x in np.linspace(0, 1, max(points, 0))] if isinstance(points, int) else list(points)
    if len(positions) < 2 or positions[0] != 0 or positions[-1] != 1 or sorted(positions) != positions:
        raise InputError(f"positions must rise from 0 to 1, got {positions}")
    scorer = _scorer(module, _weights((first, second)), batches, loss, prepare)
    scores = [scorer((1 - x, x)) for x in positions]
    losses = [s.loss for s in scores]
    chord = [(1 - x) * losses[0] + x * losses[-1] for x in positions]
    return Segment(
        positions=tuple(positions),
        losses=tuple(losses),
        accuracies=tuple(s.accuracy for s in scores),
        barrier=_find_highest(losses) - (losses[0] + losses[-1]) / 2,
        barrier_above_chord=_find_highest([value - line for value, line in zip(losses, chord, strict=True)]),
    )


def _find_highest(values: Sequence[float]) -> float:
    """Return the maximum, or NaN if there is one, which Python's `max` would ignore."""
    return math.nan if any(map(math.isnan, values)) else max(values)


def plane(
    module: nn.Module,
    states: Sequence[nn.Module | Weights],
    batches: Iterable[Batch],
    loss: LossFunction,
    *,
    resolution: int = 15,
    margin: float = 0.2,
    prepare: Prepare | None = None,
) -> Plane:
    """Score a `resolution`² grid over the plane through three state dicts or modules, with a `margin` around them.

    Args:
        module: The network; it is not changed.
        states: Three sets of weights, or modules that have them.
        batches: Labelled batches `(inputs, targets)`.
        loss: The mean loss of outputs and targets.
        resolution: The number of points along a side.
        margin: The room around the models, as a share of their extent.
        prepare: Applied to the merged module before it is scored.
    """
    if len(states) != 3 or resolution < 2:
        raise InputError(f"a plane needs three models and two points a side, got {len(states)} and {resolution}")
    weights = _weights(states)
    origin, second, third = weights
    gram = finite_products([second, third], base=origin)
    width = math.sqrt(gram[0, 0])
    along = gram[0, 1] / width if width else 0.0
    height = math.sqrt(max(gram[1, 1] - along**2, 0.0))
    if width == 0 or height <= 1e-6 * math.sqrt(gram[1, 1]):
        raise InputError("the three models lie on one line: use a segment")
    scorer = _scorer(module, weights, batches, loss, prepare)

    def grid(low: float, high: float) -> list[float]:
        room = margin * (high - low)
        return [float(x) for x in np.linspace(low - room, high + room, resolution)]

    def at(x: float, y: float) -> Score:
        towards_third = y / height
        towards_second = (x - towards_third * along) / width
        return scorer((1 - towards_second - towards_third, towards_second, towards_third))

    xs, ys = grid(min(0.0, along), max(width, along)), grid(0.0, height)
    scores = [[at(x, y) for x in xs] for y in ys]
    return Plane(
        xs=tuple(xs),
        ys=tuple(ys),
        losses=tuple(tuple(s.loss for s in row) for row in scores),
        accuracies=tuple(tuple(s.accuracy for s in row) for row in scores),
        anchors=((0.0, 0.0), (width, 0.0), (float(along), height)),
    )


def _weights(models: Sequence[nn.Module | Weights]) -> list[Weights]:
    return [weights_of(model, f"model {index}") for index, model in enumerate(models)]


def _scorer(
    module: nn.Module,
    states: Sequence[Weights],
    batches: Iterable[Batch],
    loss: LossFunction,
    prepare: Prepare | None,
) -> Callable[[Sequence[float]], Score]:
    live = evaluation_copy(module)
    again = reusable(batches, "batches")
    for index, state in enumerate(states):
        check_state(live, state, f"model {index}")

    def at(coefficients: Sequence[float]) -> Score:
        live.load_state_dict(combine(states, coefficients), strict=False)
        return score(prepare_module(live, prepare), again, loss)

    return at
