"""Search algorithms: ask for genomes in the unit cube, tell their fitness (minimised) and violations (≤ 0 is feasible).

Contains every algorithm of the thesis' table through pymoo, and random search. A searcher is a deterministic function
of its seed and of what it was told, so that a study resumes by asking and telling again, not by unpickling.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import comb
from typing import Any, Protocol

import numpy as np

from merganser.errors import InputError, did_you_mean, require
from merganser.evolve.arrays import Array


class Searcher(Protocol):
    """`ask` returns genomes (rows; none at the end), `tell` takes their fitness, in the same order."""

    def ask(self) -> Array: ...

    def tell(self, fitness: Array, violations: Array) -> None: ...


@dataclass(frozen=True)
class Problem:
    """What a search algorithm solves: numbers of variables, objectives and constraints; its size; its seed.

    `reference_points` (of minimised objectives) guide R-NSGA-II and R-NSGA-III, by default the ideal point. `starts`
    are genomes that replace the first random ones.
    """

    variables: int
    objectives: int = 1
    constraints: int = 0
    population: int = 25
    generations: int = 7
    seed: int = 0
    reference_points: Array | None = None
    starts: Array | None = None


@dataclass(frozen=True)
class Algorithm:
    """How to build an algorithm, and its abilities. `many` means it needs two objectives or more."""

    title: str
    build: Callable[[Problem], Any] | None
    many: bool = False
    constraints: bool = True


def searcher(name: str, problem: Problem) -> Searcher:
    """Return the algorithm of this name, or raise an error that explains why it cannot solve this problem."""
    key = "".join(c for c in name.lower() if c.isalnum()).replace("iii", "3").replace("ii", "2")
    if key not in ALGORITHMS:
        raise InputError(f"unknown algorithm {name!r}{did_you_mean(key, ALGORITHMS)}")
    algorithm = ALGORITHMS[key]
    if problem.constraints and not algorithm.constraints:
        able = [k for k, a in ALGORITHMS.items() if a.constraints and a.many == (problem.objectives > 1)]
        raise InputError(
            f"{algorithm.title} does not support constraints, and there are {problem.constraints}; use {able[0]}"
        )
    if algorithm.many and problem.objectives < 2:
        raise InputError(f"{algorithm.title} needs several objectives, and there is one; use ga")
    if not algorithm.many and problem.objectives > 1 and algorithm.build:
        raise InputError(f"{algorithm.title} supports one objective, and there are {problem.objectives}; use nsga2")
    if problem.population < 5:
        raise InputError(f"a population of {problem.population} is too small; at least 5")
    return PymooSearcher(algorithm.build(problem), problem) if algorithm.build else RandomSearcher(problem)


class RandomSearcher:
    """Uniform genomes, a population at a time."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._generator = np.random.default_rng(problem.seed)
        self._starts = problem.starts

    def ask(self) -> Array:
        genomes = self._generator.random((self._problem.population, self._problem.variables))
        if self._starts is not None:
            count = min(len(self._starts), len(genomes))
            genomes[:count], self._starts = self._starts[:count], None
        return genomes

    def tell(self, fitness: Array, violations: Array) -> None:
        pass


class PymooSearcher:
    """A pymoo algorithm. Individuals that it asks for again are not evaluated again."""

    def __init__(self, algorithm: Any, problem: Problem) -> None:
        stated = _pymoo("core.problem").Problem(
            n_var=problem.variables,
            n_obj=problem.objectives,
            n_ieq_constr=problem.constraints,
            xl=np.zeros(problem.variables),
            xu=np.ones(problem.variables),
        )
        self._individual = _pymoo("core.individual").Individual
        self._randomness = _Randomness(problem.seed)
        self._infills: Any = None
        self._open: list[Any] = []
        self._starts = problem.starts
        with self._randomness:
            # RVEA adapts its directions to the share of generations done; nothing else may use the termination.
            limit = _pymoo("termination.max_gen").MaximumGenerationTermination(max(problem.generations, 1))
            never = _pymoo("core.termination").NoTermination()
            rvea = isinstance(algorithm, _pymoo("algorithms.moo.rvea").RVEA)
            # cma reads seed 0 as "use the time"
            algorithm.setup(stated, termination=limit if rvea else never, seed=problem.seed + 1, verbose=False)
        self._algorithm = algorithm

    def ask(self) -> Array:
        with self._randomness, np.errstate(divide="ignore", invalid="ignore"):
            for _ in range(100):
                infills = self._algorithm.ask() if self._algorithm.termination.force_termination is False else None
                if infills is None or (not isinstance(infills, self._individual) and len(infills) == 0):
                    break
                self._infills = infills
                asked = [infills] if isinstance(infills, self._individual) else list(infills)
                self._open = [individual for individual in asked if "F" not in individual.evaluated]
                if self._open and self._starts is not None:
                    for individual, genome in zip(self._open, self._starts, strict=False):
                        individual.X = genome.astype(np.float64)
                    self._starts = None
                if self._open:
                    return np.clip(np.array([individual.X for individual in self._open], dtype=np.float64), 0, 1)
                self._algorithm.tell(infills=infills)
        return np.empty((0, self._algorithm.problem.n_var))

    def tell(self, fitness: Array, violations: Array) -> None:
        for individual, f, g in zip(self._open, fitness, violations, strict=True):
            individual.set("F", f.astype(np.float64))
            individual.set("G", g.astype(np.float64))
            individual.set("H", np.empty(0))
            individual.evaluated.update(("F", "G", "H"))
        with self._randomness, np.errstate(divide="ignore", invalid="ignore"):  # a front may be one point
            self._algorithm.tell(infills=self._infills)


class _Randomness(contextlib.AbstractContextManager[None]):
    """Uses this searcher's own global generators inside the block, and restores the caller's on exit.

    Parts of pymoo and all of cma use the global generators, and a few places in pymoo fresh entropy (`default_rng()`
    without a seed), which here is derived from the search's seed.
    """

    def __init__(self, seed: int) -> None:
        self._seeds = np.random.SeedSequence(seed)
        self._numpy: Any = np.random.RandomState(seed).get_state()
        self._python: Any = random.Random(seed).getstate()
        self._saved: tuple[Any, Any, Any] | None = None

    def __enter__(self) -> None:
        original = np.random.default_rng
        self._saved = np.random.get_state(), random.getstate(), original
        np.random.set_state(self._numpy)
        random.setstate(self._python)

        def seeded(seed: Any = None) -> np.random.Generator:
            return original(self._seeds.spawn(1)[0] if seed is None else seed)

        np.random.default_rng = seeded

    def __exit__(self, *error: object) -> None:
        assert self._saved is not None
        self._numpy, self._python = np.random.get_state(), random.getstate()
        np.random.set_state(self._saved[0])
        random.setstate(self._saved[1])
        np.random.default_rng = self._saved[2]


def _pymoo(module: str) -> Any:
    return require(f"pymoo.{module}", "evolve")


def _nonconvex(module: str, name: str) -> Any:
    return getattr(_pymoo(f"algorithms.soo.nonconvex.{module}"), name)


def _moo(module: str, name: str) -> Any:
    return getattr(_pymoo(f"algorithms.moo.{module}"), name)


def _variation() -> dict[str, Any]:
    """Return simulated binary crossover (η = 15) and polynomial mutation (η = 20), as in the thesis."""
    return {
        "sampling": _pymoo("operators.sampling.rnd").FloatRandomSampling(),
        "crossover": _pymoo("operators.crossover.sbx").SBX(eta=15, prob=0.9),
        "mutation": _pymoo("operators.mutation.pm").PM(eta=20),
    }


def _spread_directions(problem: Problem) -> Array:
    """Return as many evenly spread reference directions as fit the population."""
    partitions = 1
    while comb(partitions + problem.objectives, problem.objectives - 1) <= problem.population:
        partitions += 1
    make = _pymoo("util.ref_dirs").get_reference_directions
    directions: Array = make("das-dennis", problem.objectives, n_partitions=partitions)
    return directions


def _points(problem: Problem) -> Array:
    points = problem.reference_points
    return np.zeros((1, problem.objectives)) if points is None else np.atleast_2d(points)


def _brkga(problem: Problem) -> Any:
    elites, mutants = max(2, problem.population // 5), max(1, problem.population // 10)
    offsprings = problem.population - elites - mutants
    return _nonconvex("brkga", "BRKGA")(n_elites=elites, n_offsprings=offsprings, n_mutants=mutants)


def _cmaes(problem: Problem) -> Any:
    algorithm = _nonconvex("cmaes", "CMAES")(popsize=problem.population, sigma=0.2)
    algorithm.n_sample_points = problem.population  # as a keyword it would be passed on to cma
    return algorithm


def _agemoea(problem: Problem) -> Any:
    require("numba", "evolve")
    return _moo("age", "AGEMOEA")(pop_size=problem.population, **_variation())


def _rnsga3(problem: Problem) -> Any:
    points = _points(problem)
    share = max(1, problem.population // len(points))
    return _moo("rnsga3", "RNSGA3")(ref_points=points, pop_per_ref_point=share, **_variation())


def _moead(problem: Problem) -> Any:
    directions = _spread_directions(problem)
    neighbours = max(2, min(len(directions), problem.population // 3))
    return _moo("moead", "ParallelMOEAD")(directions, n_neighbors=neighbours, **_variation())


def _set_size(family: Callable[[str, str], Any], module: str, name: str) -> Callable[[Problem], Any]:
    return lambda s: family(module, name)(pop_size=s.population, **_variation())


def _strategy(module: str, name: str) -> Callable[[Problem], Any]:
    return lambda s: _nonconvex(module, name)(n_offsprings=s.population, rule=1 / 5)


def _direct(module: str, name: str) -> Callable[[Problem], Any]:
    return lambda s: _moo(module, name)(_spread_directions(s), pop_size=s.population, **_variation())


ALGORITHMS: Mapping[str, Algorithm] = {
    "ga": Algorithm("GA", _set_size(_nonconvex, "ga", "GA")),
    "de": Algorithm("DE", lambda s: _nonconvex("de", "DE")(pop_size=s.population)),
    "brkga": Algorithm("BRKGA", _brkga),
    "neldermead": Algorithm("Nelder-Mead", lambda s: _nonconvex("nelder", "NelderMead")(n_sample_points=s.population)),
    "patternsearch": Algorithm(
        "pattern search", lambda s: _nonconvex("pattern", "PatternSearch")(n_sample_points=s.population)
    ),
    "cmaes": Algorithm("CMA-ES", _cmaes, constraints=False),
    "es": Algorithm("ES", _strategy("es", "ES"), constraints=False),
    "sres": Algorithm("SRES", _strategy("sres", "SRES")),
    "isres": Algorithm("ISRES", _strategy("isres", "ISRES")),
    "nsga2": Algorithm("NSGA-II", _set_size(_moo, "nsga2", "NSGA2"), many=True),
    "rnsga2": Algorithm(
        "R-NSGA-II",
        lambda s: _moo("rnsga2", "RNSGA2")(ref_points=_points(s), pop_size=s.population, **_variation()),
        many=True,
    ),
    "nsga3": Algorithm("NSGA-III", _direct("nsga3", "NSGA3"), many=True),
    "unsga3": Algorithm("U-NSGA-III", _direct("unsga3", "UNSGA3"), many=True),
    "rnsga3": Algorithm("R-NSGA-III", _rnsga3, many=True),
    "moead": Algorithm("MOEA/D", _moead, many=True, constraints=False),
    "agemoea": Algorithm("AGE-MOEA", _agemoea, many=True, constraints=False),
    "ctaea": Algorithm("C-TAEA", lambda s: _moo("ctaea", "CTAEA")(_spread_directions(s), **_variation()), many=True),
    "smsemoa": Algorithm("SMS-EMOA", _set_size(_moo, "sms", "SMSEMOA"), many=True),
    "rvea": Algorithm("RVEA", _direct("rvea", "RVEA"), many=True),
    "random": Algorithm("random search", None),
}
