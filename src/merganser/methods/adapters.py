"""Merging low-rank updates in a shared basis: KnOTS and Core Space.

An update is a pair (B, A) with Δ = B·A, including the scale of the adapter. A merged pair is a pair again, so that
adapters merge into an adapter. The same rules apply to low-rank task matrices of whole models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar

from merganser.kernels.spectra import Factors, top_svd
from merganser.lazy import torch
from merganser.methods.base import Group, Method, Reduction
from merganser.methods.matrices import FLOOR, MatrixRule, WeightedDeltas
from merganser.methods.parameters import param
from merganser.methods.registry import build, lookup, register

if TYPE_CHECKING:
    from torch import Tensor

FactorPair: TypeAlias = "tuple[Tensor, Tensor]"

AdapterMethod = Literal["knots", "core_space"]
T = TypeVar("T")
_INNER = ("linear", "task_arithmetic", "ties", "tsv", "iso_c")


def merge_pairs(pairs: Sequence[FactorPair], space: AdapterMethod, rule: Method, seed: int = 0) -> FactorPair:
    """Return the merged update of one weight, of rank at most Σ r_t. `seed` is for random rules."""
    return (knots if space == "knots" else core_space)(pairs, rule, seed)


def knots(pairs: Sequence[FactorPair], rule: Method, seed: int = 0) -> FactorPair:
    """Merge by [Δ₁ … Δ_T] = U Σ [V₁ᵀ … V_Tᵀ]: `rule` merges the parts Σ V_tᵀ, and U multiplies the result.

    The SVD is of the T·r rows that remain after a basis of [B₁ … B_T] is factored out.
    """
    basis = _basis([b for b, _ in pairs])
    rows = [(basis.T @ b.double()) @ a.double() for b, a in pairs]
    rotation = top_svd(torch.cat(rows, dim=1), basis.shape[1]).above(FLOOR).u
    return basis @ rotation, apply_rule(rule, [rotation.T @ part for part in rows], seed=seed)


def core_space(pairs: Sequence[FactorPair], rule: Method, seed: int = 0) -> FactorPair:
    """Merge the cores C_t of Δ_t = U_B C_t V_Aᵀ by `rule`, with bases U_B of [B₁ … B_T] and V_A of [A₁; …; A_T].

    The change of basis is lossless: the bases span every update.
    """
    left = _basis([b for b, _ in pairs])
    right = _basis([a.T for _, a in pairs])
    cores = [(left.T @ b.double()) @ (a.double() @ right) for b, a in pairs]
    return left @ apply_rule(rule, cores, seed=seed), right.T


def truncate_pair(pair: FactorPair, rank: int) -> FactorPair:
    """Return the best pair of at most `rank`."""
    left, right = _basis([pair[0]]), _basis([pair[1].T])
    core = top_svd((left.T @ pair[0].double()) @ (pair[1].double() @ right), rank)
    return balanced(Factors(left @ core.u, core.s, right @ core.v))


def balanced(factors: Factors) -> FactorPair:
    """Return (U √Σ, √Σ Vᵀ): two factors of equal norm, which suit half precision."""
    root = factors.s.sqrt()
    return factors.u * root, root[:, None] * factors.v.T


@dataclass(frozen=True)
class LowRankSpace(MatrixRule):
    """The common part of the two rules for whole models."""

    inner: Literal["linear", "task_arithmetic", "ties", "tsv", "iso_c"] = param(
        "ties", "rule applied in the shared basis", choices=_INNER
    )
    density: float = param(0.2, "density of the inner rule ties", low=0, high=1)
    rank: int | None = param(None, "rank of each task matrix; detected if absent", low=1)

    def combine(self, deltas: WeightedDeltas) -> Tensor:
        pairs = []
        for delta in deltas:
            found = top_svd(delta, self.rank or min(deltas.shape)).above(FLOOR)
            pairs.append((found.u * found.s, found.v.T))
        b, a = self.merge_pairs(pairs)
        return (b @ a).to(deltas.dtype)

    def merge_pairs(self, pairs: Sequence[FactorPair]) -> FactorPair:
        labels = [str(index) for index in range(len(pairs))]
        settings = {"density": self.density} if self.inner == "ties" else {}
        return merge_pairs(pairs, self.space, build(lookup(self.inner), settings, labels))

    @property
    def space(self) -> AdapterMethod:
        return "knots" if self.name == "knots" else "core_space"


@register
@dataclass(frozen=True)
class Knots(LowRankSpace):
    """[Δ₁ … Δ_T] = U Σ [V₁ᵀ … V_Tᵀ]; the parts Σ V_tᵀ are merged by the `inner` rule and multiplied by U.

    Stoica et al. 2024, Model Merging with SVD to Tie the KnOTS (arXiv:2410.19735).
    """

    name = "knots"
    summary = "low-rank updates aligned by one SVD, then merged (KnOTS)"


@register
@dataclass(frozen=True)
class CoreSpace(LowRankSpace):
    """Δ_t = U C_t Vᵀ with bases U and V of all columns and all rows of Δ₁ … Δ_T; the cores C_t are merged by `inner`.

    The change of basis is lossless: the bases span every update. Panariello et al. 2025, Core Space (arXiv:2509.17786).
    """

    name = "core_space"
    summary = "low-rank updates merged as small cores in a shared basis, without loss"


def _basis(blocks: Sequence[Tensor]) -> Tensor:
    """Return orthonormal columns that span all of the blocks."""
    columns = torch.cat([block.double() for block in blocks], dim=1)
    return top_svd(columns, columns.shape[1]).above(FLOOR).u


def apply_rule(
    rule: Method, parts: Sequence[Tensor], base: Tensor | None = None, *, name: str = "core", seed: int = 0
) -> Tensor:
    """Apply a merging rule to bare tensors around a base, zero if there is none."""
    group = Group(
        name=name,
        models=tuple(parts),
        base=torch.zeros_like(parts[0]) if base is None else base,
        labels=tuple(str(index) for index in range(len(parts))),
        shape=tuple(parts[0].shape),
        seed=seed,
    )
    state = rule.reduce(_OneBlock(group)) if rule.reach == "reduce_map" else None
    return rule.merge(group, state)


@dataclass(frozen=True)
class _OneBlock:
    """A whole tensor as its only block."""

    group: Group

    @property
    def name(self) -> str:
        return self.group.name

    @property
    def labels(self) -> tuple[str, ...]:
        return self.group.labels

    @property
    def shape(self) -> tuple[int, ...]:
        return self.group.shape

    @property
    def prepared(self) -> Reduction:
        return self.group.prepared

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int, /) -> Group:
        return (self.group,)[index]

    def __iter__(self) -> Iterator[Group]:
        yield self.group

    def map(self, function: Callable[[Group], T], only: int | None = None, stride: int = 1) -> list[T]:
        return [function(self.group)]
