"""What the straight-through estimator learns in place of permutations and rotations, which have no useful gradient.

`LatentWeights` are weights Θ̃ to be matched, as published with Git Re-Basin; `LatentMaps` are matrices Z of the maps
themselves, for symmetries with rotations. Both project to the group, return the midpoint of the projection with the
derivative of what they learn, and take a step along it.
"""

from __future__ import annotations

from math import cos, pi

import torch
from torch import Tensor

from merganser.align.assignments import Assignments
from merganser.align.blocks import blocks, composite, move
from merganser.align.pairwise import weight_matching
from merganser.align.permutations import Permutations, apply, identity
from merganser.align.state import State, average
from merganser.align.symmetries import Symmetry
from merganser.kernels.assignment import Path


class LatentWeights:
    """Weights Θ̃ that start at Θ_a, and proj(Θ̃): the π(Θ_b) nearest to them, by weight matching from the last one.

    Args:
        a: The weights of the model that stays.
        b: The weights of the other.
        symmetry: Their symmetry, of permutations.
        start: The permutations to start from.
        rate: The rate of Adam, on weights.
        seed: The seed of the order of matching.
        workers: Threads for nested assignments.
    """

    def __init__(
        self,
        a: State,
        b: State,
        symmetry: Symmetry,
        start: Permutations,
        rate: float,
        seed: int = 0,
        workers: int | None = None,
    ) -> None:
        self._a, self._b, self._symmetry, self._seed, self._workers = a, b, symmetry, seed, workers
        self._last = start
        self._latent = {name: a[name].clone().requires_grad_() for name in symmetry.objective}
        self._optimiser = torch.optim.Adam(self._latent.values(), lr=rate)

    def project(self) -> Permutations:
        """Return the permutations of b that come nearest to Θ̃."""
        learned = {name: tensor.detach() for name, tensor in self._latent.items()}
        wanted = apply(self._symmetry, self._last, self._b) | learned
        options = {"start": self._last, "tries": 1, "seed": self._seed, "workers": self._workers}
        self._last = weight_matching(wanted, self._b, self._symmetry, **options).permutations  # type: ignore[arg-type]
        return self._last

    def midpoint(self) -> State:
        """Return ½ (Θ_a + proj(Θ̃)) with the derivative of ½ Θ̃. Tied tensors stay tied."""
        middle = average([self._a, apply(self._symmetry, self.project(), self._b)])
        learned = {name: middle[name] + 0.5 * (tensor - tensor.detach()) for name, tensor in self._latent.items()}
        return _tie(self._symmetry, middle | learned)

    def step(self, loss: Tensor) -> None:
        """Change Θ̃ along the gradient of a loss."""
        self._optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimiser.step()


class LatentMaps:
    """A matrix Z for every path of atoms, rows new and columns old, and proj(Z): permutations by assignment, rotations
    by Procrustes.

    The gradient of a permutation is passed to its Z as it is. Rotations are smooth: their Z stays in the group, and its
    gradient is that along the group. Heads whose units are rotated keep the places of the start.

    Args:
        a: The weights of the model that stays.
        b: The weights of the other.
        symmetry: Their symmetry.
        start: The maps to start from.
        rate: The rate of Adam; entries of a rotation of m units are of size 1/√m, and take rate/√m.
        steps: The number of steps over which the rate falls to zero (cosine).
        workers: Threads for nested assignments.
    """

    def __init__(
        self,
        a: State,
        b: State,
        symmetry: Symmetry,
        start: Permutations,
        rate: float,
        steps: int,
        workers: int | None = None,
    ) -> None:
        self._a, self._b, self._symmetry = a, b, symmetry
        self._pinned = average([a, b])
        self._blocks = {name: tuple(blocks(symmetry, name)) for name in symmetry.axes if symmetry.free(name)}
        paths = dict.fromkeys(path for own in self._blocks.values() for block in own for path in block.paths)
        self._rotated = {path for path in paths if symmetry.atoms[path[-1]].group != "permutation"}
        self._latent = {path: _build_matrix(symmetry, path, start).requires_grad_() for path in paths}
        self._assignments = Assignments(workers)
        groups = [
            {"params": [z], "lr": rate / symmetry.atoms[path[-1]].size ** 0.5 if path in self._rotated else rate}
            for path, z in self._latent.items()
        ]
        self._optimiser = torch.optim.Adam(groups, betas=(0.9, 0.99))
        self._schedule = torch.optim.lr_scheduler.LambdaLR(
            self._optimiser, lambda step: 0.5 + 0.5 * cos(pi * min(1.0, step / steps))
        )

    def project(self) -> Permutations:
        """Return the permutations that Z prefers, and the rotations nearest to it."""
        symmetry, found = self._symmetry, identity(self._symmetry)
        problems = {}
        for root, tree in symmetry.trees.items():
            sizes = {path: [symmetry.atoms[atom].size for atom in path] * 2 for path in self._latent if path[0] == root}
            profits = {path: self._latent[path].detach().numpy().reshape(size) for path, size in sizes.items()}
            problems[0, root] = (tree, profits)
        for solution, _ in self._assignments.solve(problems).values():
            found |= solution
        return found

    def midpoint(self) -> State:
        """Return ½ (Θ_a + P(Θ_b)) for P = proj(Z), with the derivative of P for that of Z. Tied tensors stay tied."""
        found = self.project()
        maps = {}
        for path, latent in self._latent.items():
            projected = _build_matrix(self._symmetry, path, found)
            if path in self._rotated:
                with torch.no_grad():
                    latent.copy_(projected)
            maps[path] = projected + latent - latent.detach()
        moved = {}
        for name, own in self._blocks.items():
            image = torch.zeros_like(self._b[name], memory_format=torch.contiguous_format)
            for block in own:
                array = block.fold(self._b[name])
                for axis, path in enumerate(block.paths):
                    array = move(array, axis, maps[path])
                block.unfold(array, image)
            moved[name] = 0.5 * (self._a[name] + image)
        return _tie(self._symmetry, self._pinned | moved)

    def step(self, loss: Tensor) -> None:
        """Change Z along the gradient of a loss."""
        self._optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        for path in self._rotated:
            z = self._latent[path]
            if z.grad is not None:  # the part that keeps Z orthogonal, to first order
                z.grad = 0.5 * (z.grad - z.detach() @ z.grad.T @ z.detach())
        self._optimiser.step()
        self._schedule.step()


def _build_matrix(symmetry: Symmetry, path: Path, permutations: Permutations) -> Tensor:
    """Return the map of a path as a matrix, rows new and columns old."""
    index = torch.as_tensor(composite(symmetry, path, permutations))
    return torch.eye(len(index))[index] if index.dim() == 1 else index.float()


def _tie(symmetry: Symmetry, state: State) -> State:
    return state | {alias: state[name] for alias, name in symmetry.aliases.items()}
