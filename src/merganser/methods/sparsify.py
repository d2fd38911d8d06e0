"""Parts of task-vector methods: sparsify task vectors.

A sparsifier first surveys the whole tensor if it needs to (`survey`), then thins the task vector of a block (`thin_`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

from merganser.kernels.arrays import AnyArray
from merganser.kernels.drops import drop_, drop_by_rank
from merganser.kernels.selection import Cutoff, largest
from merganser.kernels.spheres import total
from merganser.lazy import np, torch
from merganser.methods.base import Blocks, Group, Reduction, threshold

if TYPE_CHECKING:
    from torch import Tensor


class Sparsifier(Protocol):
    def survey(self, blocks: Blocks) -> Reduction:
        """Return the state that `thin_` needs about the whole tensor."""
        ...

    def thin_(self, delta: Tensor, group: Group, model: int, state: Reduction) -> Tensor:
        """Return the surviving entries of a model's task vector, rescaled in place."""
        ...


@dataclass(frozen=True)
class Band:
    """Keeps entries of middle magnitude: skips the `gamma` largest and keeps the next ones, exactly `density` of all.

    With γ = 0 these are the largest. Counts are ⌊density·n⌋ (at least one entry unless the density is 0) and ⌊γ·n⌋
    (fewer if too few entries would be left); ties are broken by position. `rescale` restores the L1 norm.
    """

    density: tuple[float, ...]
    gamma: tuple[float, ...]
    rescale: bool = False

    def survey(self, blocks: Blocks) -> Reduction:
        numel = math.prod(blocks.shape)
        counts = [list(band(numel, d, g)) for d, g in zip(self.density, self.gamma, strict=True)]
        return self.with_cutoffs(blocks, largest(blocks, magnitudes, counts, numel))

    def with_cutoffs(self, blocks: Blocks, cutoffs: list[list[Cutoff]]) -> Reduction:
        return cutoffs, self._norms(blocks, cutoffs) if self.rescale else None

    def thin_(self, delta: Tensor, group: Group, model: int, state: Reduction) -> Tensor:
        cutoffs, factors = state
        delta = _thin_(delta, cutoffs[model], group.offset)
        return delta if factors is None else delta.mul_(factors[model])

    def _norms(self, blocks: Blocks, cutoffs: list[list[Cutoff]]) -> list[float]:
        """Return ‖Δ‖₁ / ‖thinned Δ‖₁ of each model, 1 if nothing is left."""

        def norms(group: Group) -> list[float]:
            found = []
            for delta, pair in zip(group.deltas(), cutoffs, strict=True):
                found.append(total(delta.abs()))
                found.append(total(_thin_(delta, pair, group.offset).abs_()))
            return found

        sums = [math.fsum(column) for column in zip(*blocks.map(norms), strict=True)]
        return [before / after if after > 0 else 1.0 for before, after in zip(sums[::2], sums[1::2], strict=True)]


def band(numel: int, density: float, gamma: float) -> tuple[int, int]:
    """Return how many of the largest entries are outliers, and that number plus the entries to keep."""
    keep = min(numel, max(1, int(density * numel))) if density > 0 else 0
    skip = min(int(gamma * numel), numel - keep)
    return (skip, skip + keep) if keep else (0, 0)


def magnitudes(group: Group) -> list[Tensor]:
    return [delta.abs_() for delta in group.deltas()]


def _thin_(delta: Tensor, cutoffs: Iterable[Cutoff], offset: int) -> Tensor:
    top, bottom = cutoffs
    if top.value == math.inf:
        return bottom.shrink_(delta, offset)
    outliers = top.shrink_(delta.clone(), offset)
    return bottom.shrink_(delta, offset).sub_(outliers)


@dataclass(frozen=True)
class RandomDrop:
    """Keeps each entry with probability `density`, to 2⁻¹⁶, and divides survivors by exactly that probability."""

    density: tuple[float, ...]
    rescale: bool = True

    def survey(self, blocks: Blocks) -> Reduction:
        return None

    def thin_(self, delta: Tensor, group: Group, model: int, state: Reduction) -> Tensor:
        density = self.density[model]
        if density >= 1:
            return delta
        if density <= 0:
            return delta.zero_()
        density = max(density, 2**-16)
        bound = threshold(density)
        delta = drop_(delta, group.random_bits(model), bound)
        return delta.mul_(2**16 / (bound + 2**15)) if self.rescale else delta


@dataclass(frozen=True)
class RankedDrop:
    """Keeps entries with a probability that rises with the rank of their magnitude in the row, and divides by it.

    p = density − ε + 2ε · rank/(n − 1) for ranks 0 … n − 1, to 2⁻¹⁶. The window is narrowed where it would leave
    [0, 1], so that the expected density is as requested. A row is a row of a matrix, a whole vector, or a filter;
    magnitudes are compared at the precision of bfloat16.
    """

    density: tuple[float, ...]
    epsilon: tuple[float, ...]
    rescale: bool = True

    def survey(self, blocks: Blocks) -> Reduction:
        """Return the thinned vector as a whole if the tensor is one whose single row spans several blocks."""
        if len(blocks.shape) > 1 or len(blocks) == 1:
            return None
        models = range(len(self.density))
        parts = blocks.map(lambda group: [(d, group.random_bits(t)) for t, d in enumerate(group.deltas())])
        rows = [[torch.cat([part[t][side].view(1, -1) for part in parts], dim=1) for side in (0, 1)] for t in models]
        return [self.drop(delta, bits, t, delta.shape[1]).view(-1) for t, (delta, bits) in enumerate(rows)]

    def thin_(self, delta: Tensor, group: Group, model: int, state: Reduction) -> Tensor:
        if 0 in group.shape:
            return delta
        if state is not None:
            return delta.copy_(state[model][group.offset : group.offset + delta.numel()].view(delta.shape))
        length = row_length(group.shape)
        bits = group.random_bits(model).view(-1, length)
        return self.drop(delta.view(-1, length), bits, model, length).view_as(delta)

    def drop(self, rows: Tensor, bits: Tensor, model: int, length: int) -> Tensor:
        """Return thinned rows. The random bits belong to ranks, not to columns."""
        density = self.density[model]
        window = min(self.epsilon[model], density, 1 - density)
        return drop_by_rank(rows, bits, *_by_rank(length, density, window, self.rescale, rows.itemsize))


@lru_cache(maxsize=8)
def _by_rank(n: int, density: float, window: float, rescale: bool, itemsize: int) -> tuple[AnyArray, AnyArray]:
    """Return for each rank the bound of the random bits for its probability, and the factor of survivors, a float of
    `itemsize` bytes.
    """
    places = np.linspace(-1, 1, n) if n > 1 else np.zeros(1)
    chance = np.round(np.clip(density + window * places, 0, 1) * 2**16) / 2**16
    bounds = (chance * 2**16 - 2**15).astype(np.int32)
    gains = np.divide(1.0, chance if rescale else 1.0, out=np.zeros(n), where=chance > 0)
    return bounds, gains.astype(f"f{itemsize}")


def row_length(shape: tuple[int, ...]) -> int:
    """Return the row length: a whole vector, rows of a matrix, filters of kernels, and rows again for larger stacks of
    matrices.
    """
    if len(shape) < 2:
        return math.prod(shape)
    row = math.prod(shape[1:])
    return row if len(shape) == 2 or row <= 1 << 16 else shape[-1]
