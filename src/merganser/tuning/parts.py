"""Split a merge into parts per task, to learn coefficients for methods that are more than a sum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from merganser.errors import InputError
from merganser.kernels.spectra import Factors
from merganser.methods.duplicates import average_over_groupings
from merganser.methods.matrices import matrix_shape, rank_kept
from merganser.methods.tsv import TSV, decompose, orthogonal
from merganser.modules.functional import Weights


def tsv_parts(task_vectors: Mapping[str, Weights], rule: TSV | None = None) -> dict[str, dict[str, Tensor]]:
    """Return U⊥_t Σ_t V⊥_tᵀ for every task's matrices, Δ_t / T for other tensors; they sum to TSV-Merge's task vector.

    U⊥_t are task t's columns of the orthogonalised [U₁ … U_T]. Near-identical tasks count once, as in the merge, and
    share their part equally.

    Args:
        task_vectors: The task vectors by name.
        rule: The truncation, patterns and tolerance; by default those of `tsv`.
    """
    if not task_vectors:
        raise InputError("expected at least one task vector to split")
    rule = rule or TSV()
    parts: dict[str, dict[str, Tensor]] = {task: {} for task in task_vectors}
    for name, some in next(iter(task_vectors.values())).items():
        if missing := [task for task, vector in task_vectors.items() if name not in vector]:
            raise InputError(f"the task vector of {missing[0]!r} lacks {name!r}")
        deltas = [vector[name].detach() for vector in task_vectors.values()]
        made = _split(deltas, rule) if rule.applies(name, tuple(some.shape)) else [d / len(deltas) for d in deltas]
        for task, part in zip(task_vectors, made, strict=True):
            parts[task][name] = part
    return parts


def _split(deltas: list[Tensor], rule: TSV) -> list[Tensor]:
    n = min(matrix_shape(tuple(deltas[0].shape)))
    k = rank_kept(n, len(deltas), rule.rank_fraction) if rule.low_rank else n

    def split(factors: Sequence[Factors]) -> Tensor:
        u, s, v = orthogonal(factors, rule.orthogonalize, rule.tolerance)
        columns = [torch.split(side, [each.rank for each in factors], dim=-1) for side in (u, s, v)]
        return torch.stack([(u_t * s_t) @ v_t.T for u_t, s_t, v_t in zip(*columns, strict=True)])

    found = decompose([delta.flatten(1) for delta in deltas], k, rule.exact)
    made = split(found) if rule.orthogonalize == "none" else average_over_groupings(found, split)
    return [part.to(delta.dtype).view_as(delta) for part, delta in zip(made, deltas, strict=True)]
