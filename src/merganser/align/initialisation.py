"""Starting points of an optimisation: identity, barycentre, a random doubly stochastic point, another solution."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from merganser.align.permutations import Permutations, check, identity, random_rotations
from merganser.align.placements import Placing
from merganser.align.terms import TermLayout
from merganser.errors import InputError, one_of
from merganser.kernels.assignment import Path

#: The name of a kind of start, or the permutations of another solution, one set per model.
Start = str | Sequence[Permutations]
KINDS = ("propagate", "identity", "barycentre", "sinkhorn")


def start_placings(layout: TermLayout, count: int, start: Start, seed: int, held: frozenset[int]) -> list[Placing]:
    """Return the placing of each of `count` models; fixed models and those to be propagated are at the identity.

    At the barycentre (every entry 1/m) all units are equal, so one model must be elsewhere for the gradient to be
    informative: f does not change when all models move together, and the first model is put at the identity.
    """
    if not isinstance(start, str):
        if not isinstance(start, list | tuple):
            raise InputError(f"a start is a name or the permutations of every model, not {type(start).__name__}")
        if len(start) != count:
            raise InputError(f"a start for {count} models needs as many sets of permutations, got {len(start)}")
        return [hard_placing(layout, permutations) for permutations in start]
    one_of("start", start, KINDS)
    still = hard_placing(layout, identity(layout.symmetry))
    if start in ("identity", "propagate"):
        return [still] * count
    if start == "barycentre":
        held = held or frozenset({0})
        uniform = {path: torch.full((m, m), 1.0 / m) for path, m in _count_units(layout).items()}
        return [still if model in held else uniform for model in range(count)]
    streams = np.random.default_rng(seed).spawn(count)
    return [still if model in held else _draw_placing(layout, streams[model]) for model in range(count)]


def hard_placing(layout: TermLayout, permutations: Permutations) -> dict[Path, Tensor]:
    """Return permutations as gathers of every path."""
    check(layout.symmetry, permutations)
    return {path: index for root in layout.trees for path, index in layout.gathers(root, permutations).items()}


def soften(placing: Placing, share: float) -> dict[Path, Tensor]:
    """Return permutations mixed with the barycentre: (1 − share) P + share / m."""
    matrices = {path: torch.eye(len(p))[p] if p.dim() == 1 else p for path, p in placing.items()}
    return {path: (1.0 - share) * matrix + share / len(matrix) for path, matrix in matrices.items()}


def sinkhorn(matrices: NDArray[np.float64], tolerance: float = 1e-9, max_sweeps: int = 1000) -> NDArray[np.float64]:
    """Scale positive matrices (…, m, m) so that rows and columns sum to one (Sinkhorn-Knopp)."""
    scaled: NDArray[np.float64] = matrices / matrices.sum(axis=-1, keepdims=True)
    for _ in range(max_sweeps):
        scaled = scaled / scaled.sum(axis=-2, keepdims=True)
        rows = scaled.sum(axis=-1, keepdims=True)
        if np.abs(rows - 1.0).max() <= tolerance:
            break
        scaled = scaled / rows
    return scaled


def _count_units(layout: TermLayout) -> dict[Path, int]:
    return {path: int(np.prod(layout.sizes(path))) for paths in layout.paths.values() for path in paths}


def _draw_placing(layout: TermLayout, generator: np.random.Generator) -> dict[Path, Tensor]:
    """Return a random point of the hull: H[h, h'] · D_{hh'}[d, d'] · …, each factor doubly stochastic or a rotation.

    It is the mean over permutations drawn from H for the parents and, for the pairs they form, from D for the children.
    """
    symmetry = layout.symmetry
    draws = {}
    for name, atom in symmetry.atoms.items():
        outer = [symmetry.atoms[a].size for a in symmetry.ancestors(name)]
        sizes = (*outer, *outer, atom.size, atom.size)
        if atom.group == "permutation":
            draws[name] = sinkhorn(generator.uniform(size=sizes) + 1e-6)
        else:
            draws[name] = random_rotations(generator, sizes, atom.group)
    placing = {}
    for path, m in _count_units(layout).items():
        sizes = layout.sizes(path)
        mixed = np.ones(sizes * 2)
        for name in path:
            axes = [path.index(a) for a in (*symmetry.ancestors(name), name)]
            above, own = axes[:-1], axes[-1]
            depth = len(path)
            order = [*above, *(a + depth for a in above), own, own + depth]
            shape = [1] * (2 * depth)
            for axis in order:
                shape[axis] = (sizes * 2)[axis]
            # `order` lists the axes of the draw; sorting them puts the draw in the order of the product.
            mixed = mixed * draws[name].transpose(np.argsort(order)).reshape(shape)
        placing[path] = torch.from_numpy(mixed.reshape(m, m))
    return placing
