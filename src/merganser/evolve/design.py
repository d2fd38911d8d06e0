"""The design of a study: tasks with their items, objectives, the search space and the search."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from merganser.errors import InputError, did_you_mean
from merganser.evolve import estimators
from merganser.evolve.arrays import Array
from merganser.evolve.directions import choose_direction
from merganser.evolve.irt.model import MAX_DIMENSIONS
from merganser.evolve.searchers import Search, searcher
from merganser.evolve.space import Space, Value

#: The largest seed that numpy's and pymoo's generators accept, one of which uses the seed plus 1.
MAX_SEED = 2**32 - 2
EXTRACTORS = ("random", "stratified", "irt", "representation")


@dataclass(frozen=True)
class StudyTask:
    """A task of a study.

    Args:
        name: The name of the task in results.
        items: The number of questions.
        subset: The number of questions per candidate; by default all.
        extractor: How the subset is chosen: `"random"`, `"stratified"`, `"irt"` or `"representations"`.
        estimator: How the score of all items is estimated: `"naive"`, `"p-irt"`, `"gp-irt"`, `"mp-irt"` or `"gmp-irt"`.
        c: For gp-IRT and gmp-IRT: a number, `"adaptive"` (gmp-IRT*) or `"bias-variance"`.
        dimensions: Dimensions of the IRT; by default chosen by validation.
        test: The share of items held out for the final score.
        strata: Labels of the items for the stratified extractor.
        direction: Whether `"higher"` or `"lower"` scores are better, if known.
        test_items: The test items, instead of a share.

    Example:
        >>> task = mg.evolve.StudyTask("quiz", items=200, subset=30, estimator="gmp-irt")
    """

    name: str
    items: int
    subset: int | None = None
    extractor: str = "random"
    estimator: str = "naive"
    c: float | str = 0.5
    dimensions: int | None = None
    test: float = 0.2
    strata: tuple[str | int, ...] | None = None
    direction: str | None = None
    test_items: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        where = f"task {self.name!r}"
        if "." in self.name:
            raise InputError(f"{where}: a task's name must not contain a dot, which separates its measures")
        if self.estimator not in estimators.NAMES:
            raise InputError(
                f"{where}: unknown estimator {self.estimator!r}{did_you_mean(self.estimator, estimators.NAMES)}"
            )
        if self.extractor not in EXTRACTORS:
            raise InputError(f"{where}: unknown extractor {self.extractor!r}{did_you_mean(self.extractor, EXTRACTORS)}")
        if not 0 < self.test < 1:
            raise InputError(
                f"{where}: test is the share of items held out for the final score, between 0 and 1, not {self.test}"
            )
        listed = self.test_items or ()
        if len(set(listed)) < len(listed) or any(not 0 <= item < self.items for item in listed):
            raise InputError(f"{where}: test items must be distinct numbers from 0 to below {self.items}")
        if self.pool < 1 or self.items - self.pool < 1:
            raise InputError(f"{where}: {self.items} items cannot be split into fitness and test items")
        if self.subset is not None and not 1 <= self.subset <= self.pool:
            raise InputError(
                f"{where}: a subset of {self.subset} is more than the {self.pool} items left after "
                f"{self.items - self.pool} were held out for the test"
            )
        if isinstance(self.c, str) and self.c not in ("adaptive", "bias-variance"):
            raise InputError(f"{where}: c is a number in [0, 1], 'adaptive' or 'bias-variance', not {self.c!r}")
        if not isinstance(self.c, str) and not 0 <= self.c <= 1:
            raise InputError(f"{where}: c lies in [0, 1], not {self.c}")
        if self.dimensions is not None and not 1 <= self.dimensions <= MAX_DIMENSIONS:
            raise InputError(f"{where}: between 1 and {MAX_DIMENSIONS} dimensions, not {self.dimensions}")
        if self.direction not in (None, "higher", "lower"):
            raise InputError(f"{where}: a direction is 'higher' or 'lower', not {self.direction!r}")
        if self.direction == "lower" and self.needs_irt:
            raise InputError(f"{where}: IRT is for answers that are right or wrong; use the naive estimator")
        if (self.strata is None) == (self.extractor == "stratified"):
            raise InputError(f"{where}: strata need the stratified extractor, and it needs strata")
        if self.strata is not None and len(self.strata) != self.items:
            raise InputError(f"{where}: {len(self.strata)} strata for {self.items} items")

    @property
    def pool(self) -> int:
        """Return the number of items that fitness and IRT may use."""
        if self.test_items is not None:
            return self.items - len(self.test_items)
        return self.items - max(1, round(self.items * self.test))

    @property
    def needs_irt(self) -> bool:
        return self.estimator != "naive" or self.extractor == "irt"


@dataclass(frozen=True)
class Objective:
    """A weighted sum of measures.

    Args:
        name: The name of the objective in results.
        weights: Measures -> weights: scores of tasks (`"gsm8k"`), or other measures (`"gsm8k.length"`).
        maximize: Whether more is better.

    Example:
        >>> mean = mg.evolve.Objective("mean", {"math": 0.5, "code": 0.5})
    """

    name: str
    weights: Mapping[str, float]
    maximize: bool = True

    def __post_init__(self) -> None:
        if not self.weights:
            raise InputError(f"objective {self.name!r}: has no measure; name at least one, with its weight")
        for measure, weight in self.weights.items():
            if not math.isfinite(weight):
                raise InputError(
                    f"objective {self.name!r}: the weight of {measure!r} must be a finite number, not {weight}"
                )

    @classmethod
    def of(cls, measure: str, maximize: bool = True) -> Objective:
        return cls(measure, {measure: 1.0}, maximize)

    def value(self, scores: Mapping[str, float]) -> float:
        for measure in self.weights:
            if measure not in scores:
                raise InputError(
                    f"objective {self.name!r}: the evaluator reported no {measure!r}{did_you_mean(measure, scores)}"
                )
        return sum(weight * scores[measure] for measure, weight in self.weights.items())


@dataclass(frozen=True)
class Design:
    """Everything that determines a study besides the evaluator.

    Args:
        space: The search space.
        tasks: The tasks.
        objectives: The objectives; several give a Pareto front.
        endpoints: Labels of the merged models.
        algorithm: The search algorithm, such as `"ga"`, `"cmaes"` or `"nsga2"`.
        population: Candidates per generation.
        generations: The number of generations.
        seed: The seed of the search.
        stability: Number of candidates (the best, and others spread over the ranking) that are fully evaluated at the
            end, to measure the error of the estimator on merges.
        split_seed: The seed of the test items, so that searches with other seeds share them.
        rerank: Number of best candidates to evaluate on the whole pool; the best of them wins.
        race: Ask a candidate this many items of every task first, then twice as many and so on, and stop once it almost
            certainly gains little over the best candidate of earlier generations; 0 turns it off.
        references: Labels of further models to compare the winner with, such as the base.
        starts: Values included in the first population.
        reference_points: Reference points of NSGA-III.

    Raises:
        InputError: If the parts do not fit together.

    Example:
        >>> design = mg.evolve.Design(
        ...     space=mg.evolve.Space((mg.evolve.SearchParameter("scale", mg.evolve.Range(0.0, 1.0)),)),
        ...     tasks=(mg.evolve.StudyTask("quiz", items=50, subset=20),),
        ...     objectives=(mg.evolve.Objective.of("quiz"),),
        ...     algorithm="random",
        ... )
    """

    space: Space
    tasks: tuple[StudyTask, ...]
    objectives: tuple[Objective, ...]
    endpoints: tuple[str, ...] = ()
    algorithm: str = "ga"
    population: int = 25
    generations: int = 7
    seed: int = 0
    stability: int = 0
    split_seed: int = 0
    rerank: int = 0
    race: int = 0
    references: tuple[str, ...] = ()
    starts: tuple[Mapping[str, Value], ...] = ()
    reference_points: tuple[tuple[float, ...], ...] | None = None

    def __post_init__(self) -> None:
        if not self.tasks or not self.objectives:
            raise InputError("a study needs a task and an objective")
        names = [task.name for task in self.tasks]
        if len(set(names)) < len(names):
            raise InputError(f"two tasks are called {next(n for n in names if names.count(n) > 1)!r}")
        known = {task.name: task.direction for task in self.tasks if task.direction is not None}
        for objective in self.objectives:
            for measure in objective.weights:
                if measure.split(".")[0] not in names:
                    raise InputError(f"objective {objective.name!r}: no task {measure!r}{did_you_mean(measure, names)}")
            choose_direction(objective.name, objective.weights, objective.maximize, known)
        called = [objective.name for objective in self.objectives]
        if len(set(called)) < len(called):
            raise InputError(f"two objectives are called {next(n for n in called if called.count(n) > 1)!r}")
        for name, count in (("stability", self.stability), ("rerank", self.rerank)):
            if count < 0:
                raise InputError(f"{name}: {count} full evaluations at the end; 0 or more")
        if self.race < 0 or self.race == 1:
            raise InputError(f"race: {self.race} items in the first rung; 2 or more, or 0 for no race")
        if clash := set(self.references) & set(self.endpoints):
            raise InputError(f"{clash.pop()!r} is an endpoint already")
        for name, seed in (("seed", self.seed), ("split_seed", self.split_seed)):
            if not 0 <= seed <= MAX_SEED:
                raise InputError(f"{name}: {seed}; a whole number from 0 to {MAX_SEED}")
        if self.generations < 1:
            raise InputError(f"{self.generations} generations; at least 1")
        for task in self.tasks:
            if task.needs_irt and not self.endpoints:
                raise InputError(f"task {task.name!r}: {task.estimator} needs endpoints, and none are named")
        searcher(self.algorithm, self.search)

    @property
    def search(self) -> Search:
        return Search(
            len(self.space.variables),
            len(self.objectives),
            len(self.space.constraints),
            self.population,
            self.generations,
            self.seed,
            self._points(),
            np.array([self.space.encode(values) for values in self.starts]) if self.starts else None,
        )

    @property
    def trials(self) -> int:
        return self.population * self.generations

    def _points(self) -> Array | None:
        if self.reference_points is None:
            return None
        signs = [-1.0 if objective.maximize else 1.0 for objective in self.objectives]
        rows = self.reference_points
        if not rows or any(len(row) != len(signs) or not all(map(math.isfinite, row)) for row in rows):
            raise InputError(f"reference points have one finite number for each of the {len(signs)} objectives")
        return np.array(rows, dtype=np.float64) * signs

    def to_dict(self) -> dict[str, Any]:
        """Return the design as JSON-serialisable values, for `from_dict`."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Design:
        """Return the design from the values of `to_dict`, of this or an earlier version.

        Raises:
            ValueError: If the values are damaged.
        """
        # In earlier versions the seed of the search also drew the test items.
        return TypeAdapter(cls).validate_python({"split_seed": data["seed"], **data})
