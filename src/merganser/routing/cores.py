"""TSV-Merge between the factors of a set: the small matrix that orthogonalises them, without changing the factors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from merganser.kernels.polar import inverse_root
from merganser.kernels.spectra import Factors
from merganser.methods.tsv import TSV


class Core(NamedTuple):
    """C, and how much it amplifies rounding errors of the factors."""

    matrix: Tensor
    amplification: float


def core_of(factors: Sequence[Factors], rule: TSV) -> Core:
    """Return C with U⊥ Σ V⊥ᵀ = U C Vᵀ for U = [U₁ …], V = [V₁ …].

    The polar factor of U is U (UᵀU)^(−½), so C = (UᵀU)^(−½) Σ (VᵀV)^(−½) takes two eigenproblems of the size of the
    set's rank. A vector is a diagonal, if nothing is orthogonalised.
    """
    s = rule.scale * torch.cat([part.s for part in factors])
    if rule.orthogonalize == "none" or len(factors) == 1:
        return Core(s, 1.0)
    sides = zip(*((f.u, f.v) for f in factors), strict=True)
    left, right = (inverse_root(torch.cat(side, dim=1), rule.tolerance, rule.orthogonalize) for side in sides)
    inner = left.weights[:, None] * (left.vectors.T @ (s[:, None] * right.vectors)) * right.weights
    return Core(left.vectors @ inner @ right.vectors.T, max(left.amplification, right.amplification))
