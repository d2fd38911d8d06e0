"""Fit rows of an embedding in another model's embedding: sparse combinations, scaled by how well they predict."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from merganser.kernels.pursuit import pursue
from merganser.lazy import np, torch

if TYPE_CHECKING:
    from torch import Tensor

#: Maximum number of shared rows that are held out to measure the fit.
HELD = 1024
_STEP = 4096
#: Reads rows of the model's own tensor by index.
Read = Callable[["np.ndarray"], "Tensor"]


def fit_sparse(targets: Tensor, atoms: Tensor, own: Read, terms: int) -> tuple[Tensor, Tensor, Tensor]:
    """Express rows by shared rows, u ≈ μ' + λ Σ_j c_j (w_j − μ'), with c from t − μ ≈ Σ_j c_j (a_j − μ).

    The c_j are found by orthogonal matching pursuit among the donor's rows a; the w are the model's own rows of the
    same tokens, and μ, μ' the means of the two. λ in [0, 1] measures how well one embedding predicts the other: the
    least squares factor for shared rows that are held out and predicted from the rest. If the donor predicts nothing, λ
    = 0 and a row is the mean. Without λ and centring, rows would be longer than any trained row and take probability
    from the others in a head.

    Args:
        targets: The donor's rows of the tokens that the model lacks.
        atoms: The donor's rows of the shared tokens.
        own: Reads the model's rows of shared tokens, by their indices among the atoms.
        terms: The number of rows to combine.

    Returns:
        For every target the indices of its atoms, their factors λ c_j, and the factor of the mean, 1 − λ Σ_j c_j.
    """
    centred = atoms - atoms.mean(0)
    indices, factors = pursue(targets - atoms.mean(0), centred, terms)
    factors = factors * _estimate_trust(centred, own, terms)
    return indices, factors, 1 - factors.sum(1)


def mean_row(own: Read, count: int) -> Tensor:
    """Return the mean of the model's shared rows, streamed."""
    sums = [own(np.arange(start, min(start + _STEP, count))).double().sum(0) for start in range(0, count, _STEP)]
    return torch.stack(sums).sum(0) / count


def _estimate_trust(centred: Tensor, own: Read, terms: int) -> float:
    """Return λ = ⟨predicted, true⟩ / ⟨predicted, predicted⟩ over held-out shared rows, clipped to [0, 1]."""
    count = len(centred)
    held = np.linspace(0, count - 1, min(HELD, count // 4)).astype(np.int64)
    if len(held) < 2:
        return 1.0
    rest = np.setdiff1d(np.arange(count), held)
    indices, factors = pursue(centred[torch.from_numpy(held)], centred[torch.from_numpy(rest)], terms)
    mean = mean_row(own, count)
    true = own(held).double() - mean
    rows = own(rest[indices.numpy().reshape(-1)]).double().reshape(*indices.shape, -1) - mean
    predicted = torch.einsum("hk,hkd->hd", factors.double(), rows)
    scale = float(predicted.square().sum())
    return min(1.0, max(0.0, float((predicted * true).sum()) / scale)) if scale > 0 else 0.0
