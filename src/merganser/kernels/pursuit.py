"""Orthogonal matching pursuit: vectors as sparse combinations of others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from merganser.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

#: Targets that are fitted at once: enough for fast matrix products, few enough for memory.
BATCH = 512
_DEPENDENT = 1e-6


def pursue(targets: Tensor, atoms: Tensor, terms: int) -> tuple[Tensor, Tensor]:
    """Approximate each target as a combination of a few atoms: t ≈ Σ_j c_j · a_{i_j}.

    Orthogonal matching pursuit: each step picks the atom with the largest |⟨r, a⟩|, where r is the least-squares
    residual of the target after the atoms picked so far. Long atoms are preferred: in an embedding the short ones
    belong to tokens that were hardly trained. The atoms of a target are kept as an orthonormal basis Q, so a step costs
    one matrix product for a whole batch of targets, and the coefficients follow at the end from the triangular system
    (Q Aᵀ) c = Q t.

    Args:
        targets: The vectors to fit, (count, width), float32 or float64.
        atoms: The vectors to fit them with, (atoms, width), of the same dtype.
        terms: The number of atoms per target, at most all.

    Returns:
        The indices of the atoms and their coefficients, both (count, terms). An atom that adds nothing, because the
        target is already fitted or the atom depends on earlier ones, has the coefficient 0.

    Example:
        >>> pursue(torch.tensor([[2.0, 0.0]]), torch.eye(2), 1)
        (tensor([[0]]), tensor([[2.]]))
    """
    terms = min(terms, len(atoms))
    starts = range(0, len(targets), BATCH)
    fitted = [_pursue(targets[start : start + BATCH], atoms, terms) for start in starts]
    if not fitted:
        return torch.zeros((0, terms), dtype=torch.long), targets.new_zeros((0, terms))
    return torch.cat([indices for indices, _ in fitted]), torch.cat([coefficients for _, coefficients in fitted])


def _pursue(targets: Tensor, atoms: Tensor, terms: int) -> tuple[Tensor, Tensor]:
    count, width = targets.shape
    basis = targets.new_zeros((count, terms, width))
    triangle = targets.new_zeros((count, terms, terms))
    chosen = torch.zeros((count, terms), dtype=torch.long)
    residual = targets.clone()
    for step in range(terms):
        fit = (residual @ atoms.T).abs_()
        if step:
            fit.scatter_(1, chosen[:, :step], -1.0)
        chosen[:, step] = fit.argmax(1)
        atom = atoms[chosen[:, step]]
        rest, known = atom, basis[:, :step]
        for _ in range(2):  # twice, to remove what rounding left of the earlier directions
            parts = torch.bmm(known, rest.unsqueeze(2))
            rest = rest - torch.bmm(parts.transpose(1, 2), known).squeeze(1)
            triangle[:, :step, step] += parts.squeeze(2)
        length = rest.norm(dim=1)
        independent = length > _DEPENDENT * atom.norm(dim=1)
        triangle[:, step, step] = torch.where(independent, length, 1.0)
        basis[:, step] = torch.where(independent, 1 / length, 0.0).unsqueeze(1) * rest
        residual -= (residual * basis[:, step]).sum(1, keepdim=True) * basis[:, step]
    inner = torch.bmm(basis, targets.unsqueeze(2))
    return chosen, torch.linalg.solve_triangular(triangle, inner, upper=True).squeeze(2)
