"""Near-identical experts: a smooth transition from the published merge to counting them once.

TSV-Merge and Iso-CTS make the singular vectors of the tasks orthogonal. For two experts Δ and Δ + εE that hardly
differ, the published rule keeps what they share and adds, with the same weight, the direction in which they differ:
noise with the norm of the expert, however small ε is. At ε = 0 that direction does not exist, and the expert itself is
the result. The rule here connects the two cases. With the distance of two tasks

    D = ‖A_s/‖A_s‖ − A_t/‖A_t‖‖,

where A_t is the truncated task matrix in TSV-Merge and the whole one in Iso-CTS (which truncates the small rest that
the common directions leave: the same difference is relatively larger there), tasks closer than a threshold h form
groups (single linkage), and each member is replaced by the truncated mean of its group. The result is the mean of M(h)
over thresholds between `SAME` and `APART`, with log h weighted by a smooth step: below `SAME` experts count as one,
from `APART` on separately, and in between M changes continuously with every distance. If no experts are that close,
which is the usual case, only the distances are computed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from merganser.kernels.leading import leading_svd
from merganser.kernels.spectra import Factors, product
from merganser.lazy import torch
from merganser.methods.matrices import FLOOR

if TYPE_CHECKING:
    from torch import Tensor

#: Experts up to this distance count as one expert.
SAME = 1e-3
#: Experts from this distance on count as different.
APART = 1e-2
_LEADING = 8
_PROBES = 64


def average_over_groupings(
    factors: Sequence[Factors],
    merge: Callable[[Sequence[Factors]], Tensor],
    apart: Callable[[int, int], float] | None = None,
) -> Tensor:
    """Merge factors and count near-identical tasks as one, as the module docstring describes.

    Args:
        factors: The factors of each task.
        merge: The published merge of such factors.
        apart: The distance D of two tasks, by their numbers; by default that of their factors.

    Returns:
        The merged matrix; `merge(factors)` if no two tasks are closer than `APART`.

    Example:
        >>> one = Factors(torch.eye(2)[:, :1], torch.ones(1), torch.eye(2)[:, :1])
        >>> average_over_groupings([one, one], lambda parts: sum(part.matrix() for part in parts) / 2)
        tensor([[1., 0.],
                [0., 0.]])
    """
    apart = apart or (lambda a, b: distance(factors[a], factors[b]))
    pairs = itertools.combinations(range(len(factors)), 2)
    close = sorted((found, pair) for pair in pairs if (found := apart(*pair)) < APART)
    groups = {task: {task} for task in range(len(factors))}
    total: Tensor | None = None
    reached = 0.0
    for found, (a, b) in close:
        if groups[a] is groups[b]:
            continue
        if (share := _step(found) - reached) > 0:
            part = share * merge(_collapse(factors, groups))
            total = part if total is None else total + part
            reached += share
        joined = groups[a] | groups[b]
        groups |= dict.fromkeys(joined, joined)
    last = merge(_collapse(factors, groups))
    return last if total is None else total + (1 - reached) * last


def distance(a: Factors, b: Factors) -> float:
    """Return ‖A/‖A‖ − B/‖B‖‖ of two factored matrices, or 2 if it is certainly beyond `APART`.

    The leading components H of A decide most cases: if D ≤ `APART`, then ⟨H, B⟩/‖A‖‖B‖ differs from ‖H‖²/‖A‖² by no
    more than `APART` · ‖H‖/‖A‖ (Cauchy–Schwarz).
    """
    sizes = float(a.s.double().norm()) * float(b.s.double().norm())
    if sizes == 0:
        return 2.0
    head = a.truncate(_LEADING)
    share = float(head.s.double().norm() / a.s.double().norm())
    if share**2 - _product(head, b) / sizes > APART * share + 1e-6:
        return 2.0
    a, b = (Factors(*(part.double() for part in factors)) for factors in (a, b))
    return math.sqrt(max(0.0, 2 - 2 * _product(a, b) / sizes))


class Sketches:
    """Random projections A Ω/‖A‖ of task matrices, whose differences estimate D.

    The error is largest for differences of rank one: √(1/2p) with p probes, which is 9 %.
    """

    def __init__(self) -> None:
        self._sketches: list[Tensor | None] = []

    def add(self, matrix: Tensor) -> None:
        """Add the next task's matrix, of which only the projection is kept."""
        size = torch.linalg.vector_norm(matrix, dtype=torch.float64)
        probes = torch.randn(matrix.shape[1], _PROBES, generator=torch.Generator().manual_seed(0)).to(matrix)
        self._sketches.append(product(matrix, probes).double() / (size * _PROBES**0.5) if size > 0 else None)

    def distance(self, a: int, b: int) -> float:
        """Return D of two tasks, by their numbers; 2 if one is zero."""
        first, second = self._sketches[a], self._sketches[b]
        return 2.0 if first is None or second is None else float((first - second).norm())


def _product(a: Factors, b: Factors) -> float:
    """Return ⟨A, B⟩."""
    inner = (a.u.to(b.u.dtype).T @ b.u) * (a.v.to(b.v.dtype).T @ b.v)
    return float(a.s.double() @ inner.double() @ b.s.double())


def _step(found: float) -> float:
    """Return 0 up to `SAME`, 1 from `APART` on, and a smooth step of the logarithm in between."""
    t = math.log(max(found, 1e-300) / SAME) / math.log(APART / SAME)
    t = min(1.0, max(0.0, t))
    return t * t * (3 - 2 * t)


def _collapse(factors: Sequence[Factors], groups: Mapping[int, set[int]]) -> list[Factors]:
    """Return the factors with those of every group replaced by the truncated mean of the group."""
    found = list(factors)
    for group in {min(group): group for group in groups.values() if len(group) > 1}.values():
        mean = torch.stack([factors[task].matrix() for task in group]).mean(dim=0)
        common = leading_svd(mean, max(factors[task].rank for task in group)).above(FLOOR)
        for task in group:
            found[task] = common
    return found
