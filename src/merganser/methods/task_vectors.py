"""Task arithmetic and its descendants: θ = θ_0 + λ · consensus(sparsify(θ_t − θ_0)).

A method of this family names its two parts (`sparsify.py`, `consensus.py`) and its defaults. In recipes, `scale` may be
a gradient over depth, [α, α + β], which is LiNeS for any of them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from merganser.lazy import torch
from merganser.methods.base import Blocks, Group, Reduction, Thinning
from merganser.methods.consensus import elected_mean_, elected_sum_, weighted_sum_
from merganser.methods.global_trim import global_cutoffs, local_cutoffs
from merganser.methods.norms import TaskVectorMethod
from merganser.methods.parameters import param, per_model
from merganser.methods.registry import register
from merganser.methods.sparsify import Band, RandomDrop, RankedDrop, Sparsifier

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class TaskVectors(TaskVectorMethod, Thinning):
    """The common part of the family."""

    #: Whether models vote on the sign of each entry (TIES' consensus) or are only added.
    elects: ClassVar[bool] = False

    weight: tuple[float, ...] = per_model(1.0, "factor of each task vector")
    scale: float = param(1.0, "factor of the merged task vector", aliases=("lambda",))
    normalize: bool = param(False, "divide by the sum of the weights involved")

    @property
    def sparsifier(self) -> Sparsifier | None:
        return None

    def reduce(self, blocks: Blocks) -> Reduction:
        return self.sparsifier.survey(blocks) if self.sparsifier else None

    def reduced_by(self) -> Hashable:
        return type(self), self.sparsifier

    def thinned_by(self) -> Hashable:
        return (self.sparsifier,) if self.sparsifier else None

    def thin(self, group: Group, state: Reduction = None) -> list[Tensor]:
        deltas, sparsifier = group.deltas(), self.sparsifier
        return [sparsifier.thin_(delta, group, t, state) for t, delta in enumerate(deltas)] if sparsifier else deltas

    def combine(self, group: Group, deltas: list[Tensor]) -> Tensor:
        merged = self.consensus(deltas)
        return torch.add(group.anchor, merged, alpha=self.factor, out=merged)

    def consensus(self, deltas: list[Tensor]) -> Tensor:
        """Return the merged task vector; may overwrite the thinned ones."""
        if not self.elects:
            return weighted_sum_(deltas, self.weight, self.normalize)
        return (elected_mean_ if self.normalize else elected_sum_)(deltas, self.weight)

    @property
    def factor(self) -> float:
        """Return λ for this tensor."""
        return self.scale


@register
@dataclass(frozen=True)
class TaskArithmetic(TaskVectors):
    """θ = θ_0 + λ Σ w (θ_t − θ_0). Ilharco et al. 2023 (arXiv:2212.04089). Negative weights forget a task."""

    name = "task_arithmetic"
    summary = "the base plus a weighted sum of task vectors"


@register
@dataclass(frozen=True)
class Lines(TaskVectors):
    """Task arithmetic scaled in depth: λ = α + β (l − 1)/(L − 1) for layer l of L.

    Wang et al. 2025, LiNeS (arXiv:2410.17146). Any method of this family takes `scale: [α, α + β]` to the same effect.
    """

    name = "lines"
    summary = "task arithmetic that grows linearly with depth, to keep general features of early layers"
    scale: float = param(0.25, "α: factor of the task vector in the first layer", aliases=("lambda", "alpha"))
    gain: float = param(0.75, "β: increase of the factor up to the last layer", aliases=("beta",))
    depth: float = param(0.0, "depth of the layer from 0 (first) to 1 (last); set by the plan", low=0, high=1)

    @property
    def factor(self) -> float:
        return self.scale + self.gain * self.depth


@dataclass(frozen=True)
class Trimmed(TaskVectors):
    """Task vectors trimmed to their largest entries, per tensor or over the whole model."""

    reach = "reduce_map"
    density: tuple[float, ...] = per_model(0.2, "share of entries kept, the largest", low=0, high=1, mergekit=1.0)
    rescale: bool = param(False, "restore the L1 norm of each trimmed task vector")
    scope: str = param("tensor", "rank entries per tensor or over the whole model", choices=("tensor", "global"))

    @property
    def sparsifier(self) -> Band:
        return Band(self.density, (0.0,) * len(self.density), self.rescale)

    def needs_preparation(self) -> bool:
        return self.scope == "global"

    def prepare(self, tensors: Iterable[tuple[Mapping[str, Any], Blocks]]) -> Reduction:
        return global_cutoffs(tensors, self.density)

    def reduce(self, blocks: Blocks) -> Reduction:
        if self.scope == "tensor":
            return self.sparsifier.survey(blocks)
        return self.sparsifier.with_cutoffs(blocks, local_cutoffs(blocks.prepared, blocks.name))


@register
@dataclass(frozen=True)
class Ties(Trimmed):
    """Trim each task vector to its largest entries, elect a sign, average the entries that agree.

    θ = θ_0 + λ Σ_{t ∈ A} w Δ̂_t / Σ_{t ∈ A} w, A the models with sgn Δ̂_t = sgn Σ w Δ̂_t ≠ 0. Yadav et al. 2023
    (arXiv:2306.01708): density 0.2, λ = 1, all tensors trimmed together (`scope: global`).

    Exactly ⌊density·n⌋ entries are kept, at least one unless the density is 0, and the first of equal magnitudes.
    Where Σ w Δ̂_t is exactly zero the sign is +, as in mergekit; the paper uses the majority over the whole vector.
    """

    name = "ties"
    summary = "trim task vectors, elect signs, average what agrees"
    elects = True
    normalize: bool = param(True, "average the agreeing entries instead of adding them")


@dataclass(frozen=True)
class Dare(TaskVectors):
    """Entries of the task vectors dropped at random."""

    density: tuple[float, ...] = per_model(0.5, "probability to keep an entry", low=0, high=1, mergekit=1.0)
    rescale: bool = param(True, "divide the kept entries by the density")

    @property
    def sparsifier(self) -> RandomDrop:
        return RandomDrop(self.density, self.rescale)


@register
@dataclass(frozen=True)
class DareLinear(Dare):
    """θ = θ_0 + λ Σ w m_t ⊙ Δ_t / density, m_t ~ Bernoulli(density). Yu et al. 2024, DARE (arXiv:2311.03099).

    mergekit rescales to the L1 norm before the drop instead, which is the same up to sampling noise.
    """

    name = "dare_linear"
    summary = "task arithmetic after randomly dropping entries and rescaling the rest"


@register
@dataclass(frozen=True)
class DareTies(Dare):
    """DARE's random drop with TIES' sign election. Yu et al. 2024 (arXiv:2311.03099)."""

    name = "dare_ties"
    summary = "random drop and rescale, then TIES' sign election"
    elects = True


@dataclass(frozen=True)
class MagPrune(TaskVectors):
    """Entries of the task vectors dropped at random, small ones more likely."""

    reach = "reduce_map"
    density: tuple[float, ...] = per_model(0.5, "mean probability to keep an entry", low=0, high=1, mergekit=1.0)
    epsilon: tuple[float, ...] = per_model(
        0.15, "half-width of the window of probabilities, from smallest to largest entry of a row", low=0, high=1
    )
    rescale: bool = param(True, "divide the kept entries by their probability")

    @property
    def sparsifier(self) -> RankedDrop:
        return RankedDrop(self.density, self.epsilon, self.rescale)


@register
@dataclass(frozen=True)
class Della(MagPrune):
    """Entries kept with probability density ± ε by rank of magnitude in their row, over p; then TIES' consensus.

    Deep et al. 2024, DELLA (arXiv:2406.11617). mergekit rescales to the L1 norm before the drop instead of by 1/p.
    Magnitudes are ranked by the bits that bfloat16 keeps, equal ones in the order of their columns.
    """

    name = "della"
    summary = "magnitude-ranked random drop, then TIES' sign election"
    elects = True
    normalize: bool = param(True, "average the agreeing entries instead of adding them")


@register
@dataclass(frozen=True)
class DellaLinear(MagPrune):
    """DELLA's magnitude-ranked drop, then task arithmetic. Deep et al. 2024 (arXiv:2406.11617)."""

    name = "della_linear"
    summary = "magnitude-ranked random drop, then task arithmetic"


@dataclass(frozen=True)
class Outliers(TaskVectors):
    """Task vectors without their largest and smallest entries."""

    reach = "reduce_map"
    density: tuple[float, ...] = per_model(0.9, "share of entries kept", low=0, high=1, mergekit=1.0)
    gamma: tuple[float, ...] = per_model(0.01, "share of the largest entries dropped", low=0, high=1)
    rescale: bool = param(False, "restore the L1 norm of each task vector")

    @property
    def sparsifier(self) -> Band:
        return Band(self.density, self.gamma, self.rescale)


@register
@dataclass(frozen=True)
class Breadcrumbs(Outliers):
    """θ = θ_0 + λ Σ w m_t ⊙ Δ_t, m_t without the γ largest and the smallest entries, `density` of them kept.

    Davari and Belilovsky 2024, Model Breadcrumbs (arXiv:2312.06795). If ⌊γ·n⌋ = 0, no outlier is dropped (mergekit then
    drops the whole task vector).
    """

    name = "breadcrumbs"
    summary = "task arithmetic without the largest and the smallest entries"


@register
@dataclass(frozen=True)
class BreadcrumbsTies(Outliers):
    """Breadcrumbs' masks with TIES' sign election. Davari and Belilovsky 2024 (arXiv:2312.06795)."""

    name = "breadcrumbs_ties"
    summary = "breadcrumbs' masks, then TIES' sign election"
    elects = True
