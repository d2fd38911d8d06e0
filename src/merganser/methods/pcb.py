"""PCB-Merging: entries of task vectors weighted by importance to their task and agreement with the others."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from merganser.kernels.selection import largest
from merganser.kernels.spheres import total
from merganser.lazy import torch
from merganser.methods.base import Blocks, Group, Reduction
from merganser.methods.norms import TaskVectorMethod
from merganser.methods.parameters import param, per_model
from merganser.methods.registry import register
from merganser.methods.sparsify import band

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class _Product:
    """Δ_i ⊙ Δ_j over a tensor: its smallest entry and range, and mean exponentials of its normalised values."""

    low: float
    width: float
    #: Mean of exp(n), and of exp(T · n).
    means: tuple[float, float] = (1.0, 1.0)

    def normalize(self, product: Tensor) -> Tensor:
        """Return n = Norm(Δ_i ⊙ Δ_j), from 0 to 1; all zero if all entries are equal."""
        return (product - self.low).div_(self.width) if self.width else torch.zeros_like(product)


@register
@dataclass(frozen=True)
class PCB(TaskVectorMethod):
    """θ = θ_0 + λ Σ_t β_t ⊙ w_tΔ_t / Σ_t β_t, β_t = Softmax(T · Norm(Δ_t⊙Δ_t)) ⊙ Σ_s Softmax(Norm(Δ_t⊙Δ_s)).

    Only the `density` largest entries of each β_t count; the others are 0. Norm maps the entries of a tensor onto
    [0, 1]. Du et al. 2024, Parameter Competition Balancing (arXiv:2410.02396): density 0.05 to 0.2, λ about 1.2.

    This follows the paper. The authors' code has tanh(Δ_t ⊙ ΣΔ_s) in place of the second softmax, omits the sums of the
    softmaxes, clips outliers, and normalises the kept scores to [0, 1] again. The paper ranks all entries of a model at
    once; here scores are compared within a tensor.
    """

    name = "pcb"
    summary = "task vectors averaged entry by entry, weighted by importance and agreement"
    reach = "reduce_map"
    weight: tuple[float, ...] = per_model(1.0, "factor of each task vector")
    density: tuple[float, ...] = per_model(0.2, "share of the entries whose scores count", low=0, high=1)
    scale: float = param(1.0, "factor of the merged task vector", aliases=("lambda",))

    def reduce(self, blocks: Blocks) -> Reduction:
        """Return the normalisation of every product, and the cutoffs of the scores."""
        numel, tasks = math.prod(blocks.shape), len(self.density)
        if not numel:
            return None
        ranges = blocks.map(lambda group: [torch.aminmax(product) for product in _products(group.deltas())])
        products = []
        for column in zip(*ranges, strict=True):
            low = min(float(part.min) for part in column)
            products.append(_Product(low, max(float(part.max) for part in column) - low))

        def exponentials(group: Group) -> list[tuple[float, float]]:
            normal = [p.normalize(product) for p, product in zip(products, _products(group.deltas()), strict=True)]
            return [(total(n.exp()), total(n.mul(tasks).exp_())) for n in normal]

        # Means instead of sums, so that scores are about 1 in tensors of any size.
        sums = zip(*blocks.map(exponentials), strict=True)
        products = [
            replace(p, means=(math.fsum(s for s, _ in column) / numel, math.fsum(s for _, s in column) / numel))
            for p, column in zip(products, sums, strict=True)
        ]
        counts = [[band(numel, density, 0.0)[1]] for density in self.density]
        cutoffs = largest(blocks, lambda group: _scores(group.deltas(), products), counts, numel)
        return products, [cutoff for (cutoff,) in cutoffs]

    def merge(self, group: Group, state: Reduction = None) -> Tensor:
        if state is None:
            return group.anchor
        products, cutoffs = state
        deltas = group.deltas()
        merged, mass = torch.zeros_like(deltas[0]), torch.zeros_like(deltas[0])
        for delta, score, cutoff, weight in zip(deltas, _scores(deltas, products), cutoffs, self.weight, strict=True):
            kept = cutoff.shrink_(score, group.offset)
            merged.addcmul_(delta, kept, value=weight)
            mass.add_(kept)
        merged.div_(mass).masked_fill_(mass == 0, 0)
        return torch.add(group.anchor, merged, alpha=self.scale, out=merged)


def _products(deltas: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield Δ_i ⊙ Δ_j for every j up to i."""
    return (delta * deltas[j] for i, delta in enumerate(deltas) for j in range(i + 1))


def _scores(deltas: Sequence[Tensor], products: Sequence[_Product]) -> list[Tensor]:
    """Return β of every model; each pair's exponential is used for both models."""
    intra: list[Tensor] = []
    inter = [torch.zeros_like(delta) for delta in deltas]
    pairs = ((i, j) for i in range(len(deltas)) for j in range(i + 1))
    for (i, j), known, product in zip(pairs, products, _products(deltas), strict=True):
        normal = known.normalize(product)
        if i == j:
            intra.append((normal * len(deltas)).exp_().div_(known.means[1]))
        softmax = normal.exp_().div_(known.means[0])
        for side in {i, j}:
            inter[side].add_(softmax)
    return [own.mul_(cross) for own, cross in zip(intra, inter, strict=True)]
