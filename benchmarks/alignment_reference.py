"""The thesis' algorithm for n models as it is printed: dense matrices, a sum over pairs, a numerical line search.

    maximise Σ_{p<q} Σ_ℓ ⟨P_ℓᵖᵀ W_ℓᵖ P_{ℓ−1}ᵖ, P_ℓᑫᵀ W_ℓᑫ P_{ℓ−1}ᑫ⟩

Every gradient, and every evaluation of the objective inside `scipy.optimize.fminbound`, goes through all pairs of
models and through dense permutation matrices (`Pairs`). It stops, as the authors' code does, when the objective has not
risen by 1e-6 for five iterations, or after 200, and rounds each matrix by itself. On three random MLPs it was seen to
give the objective, the gradients (to 1e-7) and in the end the permutations of the authors' own code, crisostomi/
cycle-consistent-model-merging at commit ea1eca7.

`RunningSum` gives the same iteration the same gradients and the same objective from the sum of all images. It is no
part of what is timed: it tells how many iterations the algorithm takes and where it ends, which would take hours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import torch
from scipy.optimize import fminbound, linear_sum_assignment
from torch import Tensor

from merganser.align.initialisation import start_placings
from merganser.align.permutations import Permutations
from merganser.align.placements import Placement, SoftImage
from merganser.align.solver import layout_and_weights
from merganser.align.symmetries import Symmetry

#: Tensor name -> for each axis the name of its permutation, or None.
Spec = Mapping[str, tuple[str | None, ...]]
#: For every model and permutation a doubly stochastic matrix: rows are units, columns places of the universe.
Matrices = list[dict[str, Tensor]]


@dataclass(frozen=True)
class Step:
    """How far an iteration went toward its vertices, and the objective there."""

    size: float
    objective: float


class Pairs:
    """The objective and its gradient by the definition: pairs of models and dense matrices."""

    def __init__(self, models: Sequence[Mapping[str, Tensor]], spec: Spec) -> None:
        self.models = [
            {name: state[name] if state[name].dim() > 1 else state[name][:, None] for name in spec} for state in models
        ]
        self.spec = {name: axes if len(axes) > 1 else (*axes, None) for name, axes in spec.items()}
        self.sizes = {
            name: size
            for tensor, axes in self.spec.items()
            for name, size in zip(axes, self.models[0][tensor].shape, strict=True)
            if name is not None
        }
        self.matrices = identities(self.sizes, len(models))

    def gradient(self) -> Matrices:
        return gradient(self.models, self.spec, self.matrices, self.sizes)

    def line(self, vertices: Matrices) -> Callable[[float], float]:
        return lambda t: objective(self.models, self.spec, mix(self.matrices, vertices, t))

    def move(self, vertices: Matrices, size: float) -> float:
        """Take a step; the objective there."""
        self.matrices = mix(self.matrices, vertices, size)
        return objective(self.models, self.spec, self.matrices)


class RunningSum:
    """The same numbers in time linear in the number of models."""

    def __init__(self, models: Sequence[dict[str, Tensor]], symmetry: Symmetry) -> None:
        self.layout, weights = layout_and_weights(symmetry, models)
        placings = start_placings(self.layout, len(models), "identity", 0, frozenset())
        images = [SoftImage(self.layout, w, p) for w, p in zip(weights, placings, strict=True)]
        self.placement = Placement(self.layout, images)
        self.matrices = identities({name: atom.size for name, atom in symmetry.atoms.items()}, len(models))

    def gradient(self) -> Matrices:
        found = [self.placement.all_profits(model) for model in self.placement.free]
        return [{path[0]: torch.from_numpy(profit).T for path, profit in own.items()} for own in found]

    def line(self, vertices: Matrices) -> Callable[[float], float]:
        along = self.placement.along([self._gathers(own) for own in vertices])
        return lambda t: float(along(t))

    def move(self, vertices: Matrices, size: float) -> float:
        self.matrices = mix(self.matrices, vertices, size)
        for image, own in zip(self.placement.images, vertices, strict=True):
            if isinstance(image, SoftImage):
                image.step(self._gathers(own), size)
        self.placement.refresh()
        return self.placement.objective()

    @staticmethod
    def _gathers(vertices: Mapping[str, Tensor]) -> dict[tuple[str, ...], Tensor]:
        return {(name,): matrix.argmax(dim=0) for name, matrix in vertices.items()}


def ascend(
    calculus: Pairs | RunningSum,
    max_iterations: int = 200,
    patience: int = 5,
    tolerance: float = 1e-3,
    evaluations: int = 20,
) -> Iterator[Step]:
    """Frank-Wolfe from the identity; the matrices reached are the calculus'.

    Each line search ends within `tolerance` of its maximum, or after some evaluations of the objective.
    """
    best, stalled = 0.0, 0
    for _ in range(max_iterations):
        vertices = [{name: vertex(g) for name, g in own.items()} for own in calculus.gradient()]
        line = calculus.line(vertices)
        size = float(fminbound(lambda t, f=line: -f(t), 0.0, 1.0, xtol=tolerance, maxfun=evaluations))
        reached = calculus.move(vertices, size)
        yield Step(size, reached)
        stalled = stalled + 1 if reached - best < 1e-6 else 0
        best = max(best, reached)
        if stalled >= patience:
            return


def rounded(matrices: Matrices) -> list[Permutations]:
    """Each matrix to its nearest permutation (place -> unit), by itself."""
    return [{name: vertex(m).argmax(dim=0).numpy().astype(np.int64) for name, m in own.items()} for own in matrices]


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
) -> Matrices:
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


def identities(sizes: Mapping[str, int], count: int) -> Matrices:
    return [{name: torch.eye(size) for name, size in sizes.items()} for _ in range(count)]


def mix(here: Matrices, there: Matrices, t: float) -> Matrices:
    return [{name: (1 - t) * a[name] + t * b[name] for name in a} for a, b in zip(here, there, strict=True)]


def vertex(profit: Tensor) -> Tensor:
    """The permutation matrix with the highest profit."""
    rows, columns = linear_sum_assignment(profit.numpy(), maximize=True)
    matrix = torch.zeros_like(profit)
    matrix[torch.from_numpy(rows), torch.from_numpy(columns)] = 1.0
    return matrix


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
