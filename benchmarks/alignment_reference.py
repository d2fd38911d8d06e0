"""The thesis' algorithm for n models as it is printed: dense matrices, a sum over pairs, a numerical line search.

    maximise Σ_{p<q} Σ_ℓ ⟨P_ℓᵖᵀ W_ℓᵖ P_{ℓ−1}ᵖ, P_ℓᑫᵀ W_ℓᑫ P_{ℓ−1}ᑫ⟩

Every gradient, and every evaluation of the objective inside `scipy.optimize.fminbound`, goes through all pairs of
models and through dense permutation matrices. It stops, as the authors' code does, when the objective has not risen by
1e-6 for five iterations, or after 200, and rounds each matrix by itself. On three random MLPs it was seen to give the
objective, the gradients (to 1e-7) and in the end the permutations of the authors' own code, crisostomi/
cycle-consistent-model-merging at commit ea1eca7.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations

import torch
from scipy.optimize import fminbound, linear_sum_assignment
from torch import Tensor

#: Tensor name -> for each axis the name of its permutation, or None.
Spec = Mapping[str, tuple[str | None, ...]]
Matrices = list[dict[str, Tensor]]


def match(
    models: Sequence[Mapping[str, Tensor]],
    spec: Spec,
    max_iterations: int = 200,
    patience: int = 5,
    stop: Callable[[], bool] = lambda: False,
) -> tuple[list[dict[str, Tensor]], float, int]:
    """Permutations (universe place -> unit), the objective they reach and the number of iterations."""
    sizes = {
        name: size
        for tensor, axes in spec.items()
        for name, size in zip(axes, models[0][tensor].shape, strict=True)
        if name is not None
    }
    matrices: Matrices = [{name: torch.eye(size) for name, size in sizes.items()} for _ in models]
    models = [
        {name: state[name] if state[name].dim() > 1 else state[name][:, None] for name in spec} for state in models
    ]
    spec = {name: axes if len(axes) > 1 else (*axes, None) for name, axes in spec.items()}
    best, stalled, iteration = 0.0, 0, 0
    for iteration in range(1, max_iterations + 1):  # noqa: B007
        gradients = gradient(models, spec, matrices, sizes)
        vertices = [{name: _vertex(g) for name, g in own.items()} for own in gradients]

        def negative(t: float, here: Matrices = matrices, there: Matrices = vertices) -> float:
            return -objective(models, spec, _mix(here, there, t))

        step = float(fminbound(negative, 0.0, 1.0, xtol=1e-3, maxfun=20))
        matrices = _mix(matrices, vertices, step)
        reached = objective(models, spec, matrices)
        stalled = stalled + 1 if reached - best < 1e-6 else 0
        best = max(best, reached)
        if stalled >= patience or stop():
            break
    hard = [{name: _vertex(m) for name, m in own.items()} for own in matrices]
    found = [{name: m.argmax(dim=0) for name, m in own.items()} for own in hard]
    return found, objective(models, spec, hard), iteration


def objective(models: Sequence[Mapping[str, Tensor]], spec: Spec, matrices: Matrices) -> float:
    """The sum over pairs of models and over tensors."""
    total = 0.0
    for p, q in combinations(range(len(models)), 2):
        for name, axes in spec.items():
            moved = _to_model(models[q][name], axes, matrices[p], matrices[q])
            total += float((models[p][name] * moved).sum())
    return total


def gradient(
    models: Sequence[Mapping[str, Tensor]], spec: Spec, matrices: Matrices, sizes: Mapping[str, int]
) -> list[dict[str, Tensor]]:
    """For both models of every pair: rows and columns, each against the other model through its matrices."""
    gradients = [{name: torch.zeros(size, size) for name, size in sizes.items()} for _ in models]
    for pair in combinations(range(len(models)), 2):
        for p, q in (pair, pair[::-1]):
            for name, axes in spec.items():
                for axis, permutation in enumerate(axes):
                    if permutation is not None:
                        # All axes of q to p through the universe, but this one only to the universe.
                        moved = _to_model(models[q][name], axes, matrices[p], matrices[q], stop=axis)
                        own = models[p][name].movedim(axis, 0).flatten(1)
                        gradients[p][permutation] += own @ moved.movedim(axis, 0).flatten(1).T
    return gradients


def _to_model(
    tensor: Tensor,
    axes: Sequence[str | None],
    target: Mapping[str, Tensor],
    source: Mapping[str, Tensor],
    stop: int | None = None,
) -> Tensor:
    for axis, name in enumerate(axes):
        if name is not None:
            tensor = _multiply(source[name].T, tensor, axis)
            if axis != stop:
                tensor = _multiply(target[name], tensor, axis)
    return tensor


def _multiply(matrix: Tensor, tensor: Tensor, axis: int) -> Tensor:
    rows = tensor.movedim(axis, 0)
    return (matrix @ rows.flatten(1)).unflatten(1, rows.shape[1:]).movedim(0, axis)


def _vertex(profit: Tensor) -> Tensor:
    rows, columns = linear_sum_assignment(profit.numpy(), maximize=True)
    matrix = torch.zeros_like(profit)
    matrix[torch.from_numpy(rows), torch.from_numpy(columns)] = 1.0
    return matrix


def _mix(here: Matrices, there: Matrices, t: float) -> Matrices:
    return [{name: (1 - t) * a[name] + t * b[name] for name in a} for a, b in zip(here, there, strict=True)]
