"""The published algorithms of TSV-Merge, Iso-C and Iso-CTS, written plainly with `torch.linalg.svd`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from merganser.methods.isotropic import shares


def svd(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.linalg.svd(matrix, full_matrices=False)


def orthogonalise(matrix: Tensor) -> Tensor:
    """U Vᵀ of an SVD."""
    u, _, vh = svd(matrix)
    return u @ vh


def tsv(deltas: Sequence[Tensor]) -> Tensor:
    """TSV-Merge as in the thesis: an SVD of every task matrix, then SVDs of the concatenated factors."""
    k = max(1, min(deltas[0].shape) // len(deltas))
    found = [(u[:, :k], s[:k], vh[:k]) for u, s, vh in map(svd, deltas)]
    left, values, right = zip(*found, strict=True)
    u, v = orthogonalise(torch.cat(left, dim=1)), orthogonalise(torch.cat(right))
    return (u * torch.cat(values)) @ v


def iso_c(deltas: Sequence[Tensor]) -> Tensor:
    u, s, vh = svd(sum(deltas))  # type: ignore[arg-type]
    return s.mean() * (u @ vh)


def iso_cts(deltas: Sequence[Tensor]) -> Tensor:
    n = min(deltas[0].shape)
    share = shares(n, len(deltas), 0.8)
    u, s, vh = svd(sum(deltas))  # type: ignore[arg-type]
    common = n - share * len(deltas)
    left, values, right = [u[:, :common]], [s[:common]], [vh[:common]]
    for delta in deltas:
        own, size, other = svd(delta - left[0] @ (left[0].T @ delta))
        left.append(own[:, :share])
        values.append(size[:share])
        right.append(other[:share])
    return torch.cat(values).mean() * (orthogonalise(torch.cat(left, dim=1)) @ orthogonalise(torch.cat(right)))


METHODS = {"tsv": tsv, "iso_c": iso_c, "iso_cts": iso_cts}
