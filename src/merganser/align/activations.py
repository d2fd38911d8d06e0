"""Activation matching: units that respond alike over the data belong together.

For every tree the profit Σ_x Z_a(x) Z_b(x)ᵀ is streamed from batches through forward hooks on both models and summed
over the layers whose output channels the tree orders. It is linear in the permutation:
one (nested) assignment is exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from merganser.align.ascent import Ascent, Step
from merganser.align.matches import Match
from merganser.align.pairwise import FIRST
from merganser.align.permutations import identity
from merganser.align.solver import hard_placement, layout_and_weights
from merganser.align.state import Model, states_of
from merganser.align.symmetries import Factor, Symmetry, product
from merganser.align.terms import TermLayout
from merganser.errors import InputError
from merganser.kernels.assignment import Path, Profit, assign_all
from merganser.modules.batches import Inputs, forward, several
from merganser.modules.moments import (
    CHANNELS_LAST,
    CHANNELS_SECOND,
    Moments,
    channel_rows,
    evaluating,
    hooked,
)

#: Layer -> its output as (samples and positions, channels).
Activations = dict[str, Tensor]


def activation_matching(
    a: Model,
    b: Model,
    symmetry: Symmetry,
    *,
    batches: Iterable[Inputs],
    standardize: bool = False,
    workers: int | None = None,
) -> Match:
    """Match by cross-moments of layer outputs on batches of inputs; targets beside them are left out.

    `standardize` takes correlations, in a second pass over the batches.

    Trees that no layer shows (queries and keys inside a fused attention, say) are matched by weights, with the others
    in place.
    """
    if not (isinstance(a, nn.Module) and isinstance(b, nn.Module)):
        raise InputError("activation matching runs both models: give modules, not weights")
    several(batches, "batches")
    layout, weights = layout_and_weights(symmetry, states_of([a, b], symmetry))
    layers = _watched(a, symmetry)
    with evaluating(a, b), torch.no_grad():
        moments = _moments(a, b, layers, batches) if standardize else None
        profits = _profits(a, b, layers, batches, symmetry, moments)
    seen = sorted({path[0] for path in profits})
    problems = [(layout.trees[root], {p: v for p, v in profits.items() if p[0] == root}) for root in seen]
    permutations = identity(symmetry)
    for solution, _ in assign_all(problems, workers):
        permutations |= solution
    placement = hard_placement(layout, weights, [identity(symmetry), permutations], held=FIRST)
    ascent = Ascent(placement, [identity(symmetry), permutations], workers)
    while ascent.sweep((1, root) for root in layout.trees if root not in seen):
        pass
    objective = placement.objective()
    return Match(symmetry, ascent.permutations[1], objective, (Step("activations", objective),))


def _watched(model: nn.Module, symmetry: Symmetry) -> list[str]:
    """The layers whose output channels, the rows of their weight, something moves."""
    layers = []
    for name, module in model.named_modules():
        weight = f"{name}.weight" if name else "weight"
        if isinstance(module, CHANNELS_SECOND + CHANNELS_LAST) and weight in symmetry.axes:
            factors = [f for segment in symmetry.axes[weight][0] for f in segment.factors]
            if any(f.atom is not None for f in factors):
                layers.append(name)
    return layers


def _outputs(model: nn.Module, layers: Iterable[str], batch: Inputs) -> Activations:
    modules = dict(model.named_modules())
    found: Activations = {}

    def keep(layer: str, output: Tensor) -> None:
        rows = channel_rows(modules[layer], output)
        found[layer] = torch.cat([found[layer], rows]) if layer in found else rows

    with hooked(model, {layer: partial(keep, layer) for layer in layers}):
        forward(model, batch)
    return found


def _moments(
    a: nn.Module, b: nn.Module, layers: list[str], batches: Iterable[Inputs]
) -> tuple[dict[str, Moments], dict[str, Moments]]:
    both: tuple[dict[str, Moments], dict[str, Moments]] = ({}, {})
    for batch in batches:
        for model, moments in zip((a, b), both, strict=True):
            for layer, rows in _outputs(model, layers, batch).items():
                moments.setdefault(layer, Moments()).add(rows)
    return both


def _profits(
    a: nn.Module,
    b: nn.Module,
    layers: list[str],
    batches: Iterable[Inputs],
    symmetry: Symmetry,
    moments: tuple[dict[str, Moments], dict[str, Moments]] | None,
) -> dict[Path, Profit]:
    total: dict[Path, Profit] = {}
    seen = False
    for batch in batches:
        seen = True
        pair = [_outputs(model, layers, batch) for model in (a, b)]
        if moments is not None:
            pair = [_standardized(outputs, own) for outputs, own in zip(pair, moments, strict=True)]
        for path, profit in _cross_moments(pair[0], pair[1], symmetry).items():
            total[path] = total.get(path, np.zeros(profit.shape)) + profit
    if not seen:
        raise InputError("no batch was seen; an iterator is spent after one pass: give a list or a data loader")
    return total


def _standardized(outputs: Activations, moments: Mapping[str, Moments]) -> Activations:
    scaled = {}
    for layer, rows in outputs.items():
        mean, std = moments[layer].values
        scaled[layer] = (rows - mean) / std.clamp_min(torch.finfo(torch.float32).tiny)
    return scaled


def _cross_moments(a: Activations, b: Activations, symmetry: Symmetry) -> dict[Path, Profit]:
    """The activations as tensors with one moved axis: the gradient of their objective is the cross-moment."""
    axes = {}
    for layer, rows in a.items():
        channels = symmetry.axes[f"{layer}.weight" if layer else "weight"][0]
        axes[layer] = (channels, product(Factor(None, len(rows))))
    layout = TermLayout.of(Symmetry(symmetry.atoms, axes))
    layout = replace(layout, terms=tuple(term for term in layout.terms if len(term.paths) == 1))
    weights = [layout.weights({layer: rows.T for layer, rows in outputs.items()}) for outputs in (a, b)]
    placement = hard_placement(layout, weights, [identity(symmetry)] * 2, held=FIRST)
    return placement.all_profits(1)
