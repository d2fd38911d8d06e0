"""C²M³: n models in one shared space, the universe, with maps between them that close every cycle.

Every model i has permutations P_i to the universe; the map from j to i is P_iᵀ ∘ P_j, so that going round any
cycle comes back exactly. `universe` finds them by Frank-Wolfe on the summed agreement of all pairs of images.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from os import PathLike

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from merganser.align.ascent import Step
from merganser.align.frank_wolfe import FrankWolfe
from merganser.align.permutations import Permutations, apply, check, compose, identity, inverse
from merganser.align.solver import layout_and_weights, objective_of, solve
from merganser.align.starts import Start
from merganser.align.state import Model, State, average, states_of
from merganser.align.symmetries import Symmetry
from merganser.errors import InputError


@dataclass(frozen=True)
class Universe:
    """Models, and permutations that put each of them in the common space."""

    symmetry: Symmetry
    models: tuple[State, ...]
    permutations: tuple[Permutations, ...]
    objective: float
    trace: tuple[Step, ...] = ()

    @property
    def iterations(self) -> int:
        return sum(step.phase == "frank_wolfe" for step in self.trace)

    def __len__(self) -> int:
        return len(self.models)

    def to_universe(self, model: int) -> State:
        """Model `model` as it looks in the universe: the same function, its units reordered."""
        return apply(self.symmetry, self.permutations[model], self.models[model])

    def pairwise(self, target: int, source: int) -> Permutations:
        """The permutations that put model `source` in the space of model `target`."""
        return compose(self.symmetry, self.permutations[source], inverse(self.symmetry, self.permutations[target]))

    def merged(self, weights: Sequence[float] | None = None) -> State:
        """The weighted mean of the models in the universe."""
        return average([self.to_universe(model) for model in range(len(self))], weights)

    def subset(self, members: Sequence[int]) -> Universe:
        """Some of the models, matched as they were together with all the others."""
        models = tuple(self.models[m] for m in members)
        permutations = tuple(self.permutations[m] for m in members)
        return Universe(self.symmetry, models, permutations, objective_of(models, permutations, self.symmetry))

    def cycle_error(self) -> float:
        """The largest ℓ₂ distance between a model and itself after a walk through all the others and back.

        Walked through really composed pairwise maps; zero, because the maps factor through the universe.
        """
        worst = 0.0
        for first in range(len(self)):
            walk = [*range(first, len(self)), *range(first), first]
            maps = identity(self.symmetry)
            for source, target in pairwise(walk):
                maps = compose(self.symmetry, maps, self.pairwise(target, source))
            model = self.models[first]
            back = apply(self.symmetry, maps, model)
            squares = sum(float(((back[n].double() - t.double()) ** 2).sum()) for n, t in model.items())
            worst = max(worst, squares**0.5)
        return worst

    def save(self, path: str | PathLike[str]) -> None:
        """The permutations, the symmetry and the trace as one safetensors file (not the weights)."""
        arrays = {
            f"{model}/{name}": np.ascontiguousarray(index)
            for model, permutations in enumerate(self.permutations)
            for name, index in permutations.items()
        }
        record = {"objective": self.objective, "trace": [asdict(step) for step in self.trace]}
        save_file(arrays, path, metadata={"symmetry": self.symmetry.to_json(), "universe": json.dumps(record)})

    @classmethod
    def load(cls, path: str | PathLike[str], models: Sequence[Model]) -> Universe:
        """What `save` wrote, for the models it was found for, in their order."""
        try:
            with safe_open(path, framework="numpy") as file:
                metadata = file.metadata() or {}
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            symmetry = Symmetry.from_json(metadata["symmetry"])
            record = json.loads(metadata["universe"])
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise InputError(f"cannot read a universe from {path}: {error}") from error
        found: list[Permutations] = [{} for _ in {name.split("/", 1)[0] for name in arrays}]
        for key, index in arrays.items():
            model, name = key.split("/", 1)
            found[int(model)][name] = index
        if len(found) != len(models):
            raise InputError(f"{path} is a universe of {len(found)} models, got {len(models)}")
        for permutations in found:
            check(symmetry, permutations)
        states = tuple(states_of(models, symmetry))
        trace = tuple(Step(**step) for step in record["trace"])
        return cls(symmetry, states, tuple(found), record["objective"], trace)


def universe(
    models: Sequence[Model],
    symmetry: Symmetry,
    *,
    start: Start = "identity",
    starts: int = 1,
    seed: int = 0,
    solver: FrankWolfe | None = None,
    workers: int | None = None,
) -> Universe:
    """Match n ≥ 2 models jointly (C²M³).

    `start` is "identity", "barycentre", "sinkhorn" (random, by `seed`; the best of `starts` runs is kept) or the
    permutations of another solution. All but "sinkhorn" are deterministic and ignore the seed. No data is needed.
    """
    states = states_of(models, symmetry, least=2)
    layout, weights = layout_and_weights(symmetry, states)
    solved = solve(layout, weights, start=start, starts=starts, seed=seed, solver=solver, workers=workers)
    return Universe(symmetry, tuple(states), tuple(solved.permutations), solved.objective, tuple(solved.trace))
