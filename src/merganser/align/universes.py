"""C²M³: map n models to one shared space, the universe, with cycle-consistent maps between them.

Every model i has permutations P_i to the universe; the map from j to i is P_iᵀ ∘ P_j, so that going round any
cycle comes back exactly. `universe` finds them by Frank-Wolfe on the summed agreement of all pairs of images.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from os import PathLike
from typing import Any

from merganser.align.activations import solve_by_activations
from merganser.align.ascent import Step
from merganser.align.frank_wolfe import FrankWolfe
from merganser.align.initialisation import Start
from merganser.align.permutations import Permutations, apply, compose, identity, inverse
from merganser.align.records import Record
from merganser.align.solver import layout_and_weights, objective_of, solve
from merganser.align.state import State, average, check_models, fingerprint, states_of
from merganser.align.symmetries import Symmetry
from merganser.checkpoints.opening import Reference
from merganser.errors import InputError
from merganser.modules.batches import InputsLike
from merganser.notebooks import Shown


@dataclass(frozen=True)
class Universe(Shown):
    """Models, and permutations that map each of them to the common space.

    Attributes:
        symmetry: The symmetry of the architecture.
        models: The weights of the models.
        permutations: For each model its map into the universe.
        objective: The objective that was reached.
        trace: The steps of the search.
        notes: What to doubt about the result.

    Example:
        >>> universe = mg.align.universe(models, mg.align.symmetry(models[0], images))
        >>> base.load_state_dict(universe.merged())
        <All keys matched successfully>
    """

    symmetry: Symmetry
    models: tuple[State, ...]
    permutations: tuple[Permutations, ...]
    objective: float
    trace: tuple[Step, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def iterations(self) -> int:
        return sum(step.phase == "frank_wolfe" for step in self.trace)

    def __len__(self) -> int:
        return len(self.models)

    def to_universe(self, model: int) -> State:
        """Return model `model` in the universe: the same function with its units reordered."""
        self._check_members([model])
        return apply(self.symmetry, self.permutations[model], self.models[model])

    def pairwise(self, target: int, source: int) -> Permutations:
        """Return the permutations that map model `source` to the space of model `target`."""
        self._check_members([target, source])
        return compose(self.symmetry, self.permutations[source], inverse(self.symmetry, self.permutations[target]))

    def merged(self, weights: Sequence[float] | None = None) -> State:
        """Return the weighted mean of the models in the universe."""
        return average([self.to_universe(model) for model in range(len(self))], weights)

    def subset(self, members: Sequence[int]) -> Universe:
        """Return some of the models, with the permutations that were found for all."""
        self._check_members(members)
        models = tuple(self.models[m] for m in members)
        permutations = tuple(self.permutations[m] for m in members)
        return Universe(self.symmetry, models, permutations, objective_of(models, permutations, self.symmetry))

    def cycle_error(self) -> float:
        """Return the largest ℓ₂ distance between a model and itself after a cycle through all the others.

        Pairwise maps are composed; the result is zero because the maps factor through the universe.
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
        """Save the permutations, the symmetry and the trace, but not the weights, as one safetensors file."""
        models = tuple(fingerprint(state, self.symmetry) for state in self.models)
        Record(self.symmetry, models, self.permutations, self.objective, self.trace).save(path)

    @classmethod
    def load(cls, path: str | PathLike[str], models: Sequence[Reference]) -> Universe:
        """Load a saved universe for its models, which are identified by their weights and may be in any order."""
        record = Record.load(path)
        if len(record.models) != len(models):
            raise InputError(f"{path} is a universe of {len(record.models)} models, got {len(models)}")
        states = tuple(states_of(models, record.symmetry))
        left = list(range(len(record.models)))
        permutations = []
        for position, state in enumerate(states):
            own = fingerprint(state, record.symmetry)
            found = next((i for i in left if record.models[i] == own), None)
            if found is None:
                raise InputError(
                    f"model {position} (counting from 0) is not one of the models of {path}: permutations "
                    "fit the units of one model only; match these models again"
                )
            left.remove(found)
            permutations.append(record.permutations[found])
        objective = objective_of(states, permutations, record.symmetry)
        return cls(record.symmetry, states, tuple(permutations), objective, record.trace)

    def _check_members(self, members: Sequence[int]) -> None:
        if not members:
            raise InputError("a subset of a universe needs at least one model")
        for model in members:
            if not 0 <= model < len(self):
                raise InputError(f"no model {model} in a universe of {len(self)} models (counting from 0)")


def universe(
    models: Sequence[Reference],
    symmetry: Symmetry,
    *,
    batches: Iterable[InputsLike] | None = None,
    standardize: bool = True,
    start: Start = "propagate",
    starts: int = 1,
    seed: int = 0,
    solver: FrankWolfe | None = None,
    workers: int | None = None,
) -> Universe:
    """Match n ≥ 2 models jointly (C²M³), by their weights or, with `batches`, by their activations.

    By weights, permutations maximise Σ_{p<q} ⟨π_p(θ_p), π_q(θ_q)⟩. By activations, Σ_{p<q} ⟨P_p C_pq, P_q⟩ with the
    correlations C_pq of the units of two models over the batches; units that no layer shows are matched by weights. The
    `objective` of the result is that of the weights in either case.

    Args:
        models: Models of one architecture; modules, if there are `batches`.
        symmetry: Their symmetry.
        batches: Inputs to compare activations on; targets beside them are left out.
        standardize: Compare activations by their correlations, not by their moments.
        start: "propagate" (each model placed beside the first, from its inputs and outputs inwards), "identity",
            "barycentre", "sinkhorn" (random, by `seed`) or the permutations of another solution.
        starts: Random starts, of which the best is kept.
        seed: Of the random starts; all others are deterministic.
        solver: Tolerances of Frank-Wolfe.
        workers: Threads for the assignments.

    Returns:
        The models with their permutations to the common space.

    Raises:
        InputError: The models do not fit the symmetry, or cannot run on the batches.

    Example:
        >>> mg.align.universe(networks, symmetry).merged()  # doctest: +SKIP
        >>> mg.align.universe(networks, symmetry, batches=[inputs]).merged()  # doctest: +SKIP
    """
    check_models(models)
    models = list(models)
    states = states_of(models, symmetry, least=2)
    options: dict[str, Any] = {"start": start, "starts": starts, "seed": seed, "solver": solver}
    if batches is None:
        layout, weights = layout_and_weights(symmetry, states)
        solved = solve(layout, weights, workers=workers, **options)
    else:
        solved = solve_by_activations(
            models, states, symmetry, batches, standardize=standardize, workers=workers, **options
        )
    return Universe(symmetry, tuple(states), tuple(solved.permutations), solved.objective, tuple(solved.trace))
