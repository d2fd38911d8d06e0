"""Model Stock: interpolate from the base to the mean of its fine-tuned models, by the angle between them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING

from merganser.kernels.arrays import Reals
from merganser.kernels.spheres import sums
from merganser.lazy import np, torch
from merganser.methods.averages import weighted_mean
from merganser.methods.base import Blocks, Group, Method, Reduction
from merganser.methods.parameters import param
from merganser.methods.registry import register
from merganser.methods.spherical import gram

if TYPE_CHECKING:
    from torch import Tensor


@register
@dataclass(frozen=True)
class ModelStock(Method):
    """θ = t · mean(θ_t) + (1 − t) θ_0 with t = N cos φ / (1 + (N − 1) cos φ).

    cos φ is the mean cosine between task vectors, of the whole tensor or of each vector along the last axis
    (`filter_wise`). Jang et al. 2024, Model Stock (arXiv:2403.19522). A zero task vector has cosine 0 to any other.
    mergekit raises ‖Δ_i‖‖Δ_j‖ to at least 1e-6, which pulls tensors with tiny task vectors to the base; here the cosine
    is exact at any scale.
    """

    name = "model_stock"
    summary = "interpolation from the base to the mean of the models, by the angle between them"
    reach = "reduce_map"
    base = "required"
    models = (2, math.inf)
    filter_wise: bool = param(False, "one ratio per vector along the last axis instead of per tensor")

    def reduce(self, blocks: Blocks) -> Reduction:
        if self.filter_wise and len(blocks.shape) > 1:
            return None
        matrix = gram(blocks)
        norms = np.sqrt(np.diag(matrix))
        products = [(matrix[i, j], norms[i] * norms[j]) for i, j in combinations(range(len(norms)), 2)]
        cosine = sum(0.0 if scale == 0 else dot / scale for dot, scale in products) / len(products)
        return float(_ratio(np.asarray(cosine), len(norms)))

    def merge(self, group: Group, state: Reduction = None) -> Tensor:
        mean = weighted_mean(group.models, [1.0] * len(group.models))
        if state is not None:
            return torch.lerp(group.anchor, mean, state)
        deltas = group.deltas()
        norms = [sums(d * d, -1, keepdim=True).sqrt_() for d in deltas]
        cosines = []
        for i, j in combinations(range(len(deltas)), 2):
            scale = norms[i] * norms[j]
            dot = sums(deltas[i] * deltas[j], -1, keepdim=True)
            cosines.append(torch.where(scale == 0, 0.0, dot / scale))
        ratio = _ratio(torch.stack(cosines).mean(0).cpu().numpy(), len(deltas))
        return torch.lerp(group.anchor, mean, torch.from_numpy(ratio).to(mean))


def _ratio(cosine: Reals, count: int) -> Reals:
    """Return t of the mean cosine; 0 (the base) if task vectors cancel and t has its pole."""
    cosine = np.clip(cosine, -1, 1)
    below = 1 + (count - 1) * cosine
    return np.divide(count * cosine, below, out=np.zeros_like(below), where=~(below <= 1e-6))
