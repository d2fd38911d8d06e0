"""The design of a study: space, tasks, objectives and search; the same in run files, Python and study files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any

import numpy as np
from pydantic import BeforeValidator

from merganser.errors import InputError, did_you_mean
from merganser.evolve.arrays import Array
from merganser.evolve.domains import Value
from merganser.evolve.measures import task_of
from merganser.evolve.objectives import Objective
from merganser.evolve.schema import SettingError, StudyRecord
from merganser.evolve.searchers import Problem, searcher
from merganser.evolve.space import SearchParameter, Space
from merganser.evolve.tasks import StudyTask

#: The largest seed that numpy's and pymoo's generators accept, one of which uses the seed plus 1.
MAX_SEED = 2**32 - 2
#: The label of the base, unless a model has it.
BASE = "base"


@dataclass(frozen=True)
class Search(StudyRecord):
    """The search of a study.

    Args:
        algorithm: The search algorithm, such as `"ga"`, `"cmaes"` or `"nsga2"`.
        population: Candidates per generation.
        generations: The number of generations.
        seed: The seed of the search.
        split_seed: The seed of the test items, so that searches with other seeds share them.
        stability: Number of candidates (the best, and others spread over the ranking) that are fully evaluated at the
            end, to measure the error of the estimator on merges.
        rerank: Number of best candidates to evaluate on the whole pool; the best of them wins.
        race: Ask a candidate this many items of every task first, then twice as many and so on, and stop once it almost
            certainly gains little over the best candidate of earlier generations; 0 turns it off.
        reference_points: Reference points of R-NSGA-II and R-NSGA-III.

    Example:
        >>> search = mg.evolve.Search("random", population=10, generations=3)
    """

    algorithm: str = "ga"
    population: int = 25
    generations: int = 7
    seed: int = 0
    split_seed: int = 0
    stability: int = 0
    rerank: int = 3
    race: int = 0
    reference_points: tuple[tuple[float, ...], ...] | None = None

    def __post_init__(self) -> None:
        for name, count in (("stability", self.stability), ("rerank", self.rerank)):
            if count < 0:
                raise SettingError(f"{name}: {count} full evaluations at the end; 0 or more")
        if self.race < 0 or self.race == 1:
            raise SettingError(f"race: {self.race} items in the first rung; 2 or more, or 0 for no race")
        for name, seed in (("seed", self.seed), ("split_seed", self.split_seed)):
            if not 0 <= seed <= MAX_SEED:
                raise SettingError(f"{name}: {seed}; a whole number from 0 to {MAX_SEED}")
        if self.generations < 1:
            raise SettingError(f"{self.generations} generations; at least 1")

    @property
    def trials(self) -> int:
        return self.population * self.generations


def _objective(entry: Any) -> Any:
    return Objective.of(entry) if isinstance(entry, str) else entry


@dataclass(frozen=True, kw_only=True)
class Design(StudyRecord):
    """Everything that determines a study besides the evaluator. A run file (`RunFile`) adds the evaluator.

    Args:
        space: The parameters under search, by name.
        tasks: The tasks, by name.
        objectives: The objectives; several give a Pareto front.
        constraints: Linear inequalities such as `weight.math + 2 * weight.code <= 1.5`.
        models: The merged models by label: paths or hub ids. An evaluator of your own gets the labels.
        base: The model they were fine-tuned from; the winner is compared with it too.
        search: The algorithm and its size.
        starts: Values included in the first population.
        depth: The number of layers of the models, for parameters that need it.

    Raises:
        SettingError: If the parts do not fit together.

    Example:
        >>> design = mg.evolve.Design(
        ...     space={"scale": mg.evolve.SearchParameter(0.0, 1.0)},
        ...     tasks={"quiz": mg.evolve.StudyTask(items=50, subset=20)},
        ...     objectives=(mg.evolve.Objective.of("quiz"),),
        ...     search=mg.evolve.Search("random"),
        ... )
    """

    space: Mapping[str, SearchParameter]
    tasks: Mapping[str, StudyTask]
    objectives: tuple[Annotated[Objective, BeforeValidator(_objective, json_schema_input_type=str | Objective)], ...]
    constraints: tuple[str, ...] = ()
    models: Mapping[str, str] = field(default_factory=dict)
    base: str | None = None
    search: Search = field(default_factory=Search)
    starts: tuple[Mapping[str, Value], ...] = ()
    depth: int = 0

    def __post_init__(self) -> None:
        if not self.tasks or not self.objectives:
            raise SettingError("a study needs a task and an objective")
        for name in self.tasks:
            if "." in name:
                raise SettingError(f"tasks.{name}: a task's name must not contain a dot, which separates its measures")
        for objective in self.objectives:
            for measure in objective.measures:
                if task_of(measure) not in self.tasks:
                    hint = did_you_mean(measure, self.tasks)
                    raise SettingError(f"objective {objective.name!r}: no task {measure!r}{hint}")
        called = [objective.name for objective in self.objectives]
        if len(set(called)) < len(called):
            raise SettingError(f"two objectives are called {next(n for n in called if called.count(n) > 1)!r}")
        self._check_completed()

    def _check_completed(self) -> None:
        """Check what depends on the items, their directions and the models, which a run file does not say itself."""
        if uncounted := [name for name, task in self.tasks.items() if not task.items]:
            raise SettingError(f"tasks.{uncounted[0]}: items: give their number")
        known: dict[str, str] = {name: task.direction for name, task in self.tasks.items() if task.direction}
        object.__setattr__(self, "objectives", tuple(objective.directed(known) for objective in self.objectives))
        for name, task in self.tasks.items():
            if task.needs_irt and not self.models:
                raise SettingError(f"task {name!r}: {task.estimator} needs endpoints, and no models are named")
        searcher(self.search.algorithm, self.problem)

    @cached_property
    def search_space(self) -> Space:
        """Return the space with its variables."""
        return Space(self.space, self.constraints, self.endpoints, self.depth)

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Return the labels of the merged models."""
        return tuple(self.models)

    @property
    def references(self) -> tuple[str, ...]:
        """Return the labels of further models to compare the winner with: the base, unless it is one of the models."""
        named = self.base is None or BASE in self.models or self.base in self.models.values()
        return () if named else (BASE,)

    @property
    def problem(self) -> Problem:
        """Return the problem that the search algorithm solves."""
        search, space = self.search, self.search_space
        starts = np.array([self._start(i) for i in range(len(self.starts))]) if self.starts else None
        return Problem(
            len(space.variables),
            len(self.objectives),
            len(space.constraints),
            search.population,
            search.generations,
            search.seed,
            self._reference_points(),
            starts,
        )

    def _start(self, number: int) -> Array:
        """Return the genome of one of the `starts`."""
        values = self.starts[number]
        try:
            genome = self.search_space.encode(values)
        except InputError as error:
            raise SettingError(f"starts[{number}]: {error}") from error
        if (self.search_space.violations(values) > 0).any():
            raise SettingError(f"starts[{number}]: violates the constraints, so it would not be evaluated")
        return genome

    def _reference_points(self) -> Array | None:
        rows, signs = self.search.reference_points, [-objective.sign for objective in self.objectives]
        if rows is None:
            return None
        if not rows or any(len(row) != len(signs) or not all(map(math.isfinite, row)) for row in rows):
            raise SettingError(f"reference points have one finite number for each of the {len(signs)} objectives")
        return np.array(rows, dtype=np.float64) * signs
