"""Units of several models in groups of units that respond alike, and which units may be grouped at all.

Many units become one if whatever writes them is averaged and whatever reads them is summed. That keeps the function
only where every unit goes its own way between being written and being read: not under a normalisation over the units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.cluster.hierarchy import linkage
from scipy.spatial.distance import squareform
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from merganser.align.blocks import Block, blocks
from merganser.align.double_precision import call_in_double, random_weights
from merganser.align.execution import example_arguments, plain_kernels
from merganser.align.outputs import choose
from merganser.align.sensitivity import relative_difference
from merganser.align.symmetries import Symmetry
from merganser.kernels.linear_assignment import Index
from merganser.modules.batches import InputsLike, drop_targets
from merganser.modules.moments import is_turned

_RTOL = 1e-9


def group_units(gram: Tensor, count: int) -> Index:
    """Put units into `count` groups by complete linkage of their correlations; returns the group of every unit.

    Again and again the two groups are joined whose least alike members are most alike, so that a group has no member
    that is unlike the rest. Pairs alone, average and Ward's linkage made worse networks of the CNNs of
    `benchmarks/zip.py`.

    Args:
        gram: Σ_x z zᵀ of the standardised responses of all units.
        count: The number of groups, at most that of the units.
    """
    norms = gram.diagonal().clamp_min(torch.finfo(torch.float64).tiny).sqrt()
    distance: NDArray[np.float64] = 1.0 - (gram / torch.outer(norms, norms)).cpu().numpy()
    np.fill_diagonal(distance, 0.0)
    merges = linkage(squareform((distance + distance.T) / 2, checks=False), "complete")
    members: dict[int, list[int]] = {unit: [unit] for unit in range(len(distance))}
    for step, (a, b) in enumerate(merges[: len(distance) - count, :2].astype(int)):
        members[len(distance) + step] = members.pop(a) + members.pop(b)
    groups = np.empty(len(distance), dtype=np.int64)
    for place, units in enumerate(sorted(members.values(), key=min)):
        groups[units] = place
    return groups


def reads(module: nn.Module, name: str, dim: int) -> bool:
    """Whether axis `dim` of a weight counts what a layer reads, by the kind of the layer; else it writes."""
    owner, _, _ = name.rpartition(".")
    layer = module.get_submodule(owner)
    linear = isinstance(layer, nn.Linear | nn.modules.conv._ConvNd | nn.MultiheadAttention) or is_turned(layer)
    return linear and name.endswith("weight") and dim == (0 if is_turned(layer) else 1)


def axis_dims(block: Block) -> list[int]:
    """For every moved axis of a block the axis of the tensor it lies on."""
    found: list[int] = []
    for path in block.paths:
        on = (dim for dim, segment in enumerate(block.segments) if path[-1] in segment.atoms)
        found.append(next(dim for dim in on if (path, dim) not in zip(block.paths, found, strict=False)))
    return found


def groupable(module: nn.Module, symmetry: Symmetry, example: InputsLike, seed: int = 0) -> dict[str, bool]:
    """For every atom that is not nested: whether equal units can be made one, tested on random weights in float64.

    Unit 1 becomes a copy of unit 0 wherever it is written; then all that reads it is moved to unit 0; then it is
    written at random. The outputs must not change in the last two steps.
    """
    inputs = example_arguments(module, _two_samples(drop_targets(module, example)), None)
    nested = {atom.parent for atom in symmetry.atoms.values()}
    found = {}
    with plain_kernels(), torch.no_grad():
        for atom in symmetry.atoms.values():
            if atom.parent is not None or atom.name in nested or atom.size < 2:
                continue
            state, rest = random_weights(module, symmetry, seed)
            state = {name: tensor.clone() for name, tensor in state.items()}

            def run(state: dict[str, Tensor] = state, rest: dict[str, Tensor] = rest) -> list[Tensor]:
                return [t.double() for t in choose(call_in_double(module, {**state, **rest}, inputs), None)]

            _edit(module, symmetry, state, atom.name, False, lambda zero, one: (zero, zero))
            expected = run()
            _edit(module, symmetry, state, atom.name, True, lambda zero, one: (zero + one, 0 * one))
            moved = run()
            generator = torch.Generator().manual_seed(seed)

            def redraw(zero: Tensor, one: Tensor, generator: torch.Generator = generator) -> tuple[Tensor, Tensor]:
                return zero, one + one.abs() * torch.rand(one.shape, generator=generator, dtype=one.dtype)

            _edit(module, symmetry, state, atom.name, False, redraw)
            pairs = [*zip(expected, moved, strict=True), *zip(expected, run(), strict=True)]
            found[atom.name] = all(relative_difference(a, b) <= _RTOL for a, b in pairs)
    return found


def _two_samples(inputs: InputsLike) -> InputsLike:
    """The first two samples, where all tensors count the same number of them."""
    counts = {len(leaf) if leaf.dim() else 0 for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)}
    if len(counts) != 1 or min(counts) < 3:
        return inputs
    few: InputsLike = tree_map_only(Tensor, lambda leaf: leaf[:2], inputs)
    return few


def _edit(
    module: nn.Module,
    symmetry: Symmetry,
    state: dict[str, Tensor],
    atom: str,
    reading: bool,
    change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
) -> None:
    """Change units 0 and 1 of an atom in every tensor, where they are read or where they are written."""
    for name in dict.fromkeys(name for name, _ in symmetry.occurrences[atom]):
        if name in symmetry.aliases or not state[name].is_floating_point():
            continue
        new = state[name].clone()
        for block in blocks(symmetry, name):
            array = block.fold(new).clone()
            for axis in _axes(module, block, atom, reading):
                zero, one = (array.select(axis, unit).clone() for unit in (0, 1))
                for unit, value in enumerate(change(zero, one)):
                    array.select(axis, unit).copy_(value)
            block.unfold(array, new)
        for other in (name, *(alias for alias, first in symmetry.aliases.items() if first == name)):
            state[other] = new


def _axes(module: nn.Module, block: Block, atom: str, reading: bool) -> Iterator[int]:
    for axis, (path, dim) in enumerate(zip(block.paths, axis_dims(block), strict=True)):
        if path == (atom,) and reads(module, block.name, dim) == reading:
            yield axis
