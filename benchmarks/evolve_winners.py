"""What searches with few questions find, on kept answers, against what they find with full evaluation."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from benchmarks.evolve_answers import Pool, Setting
from merganser.evolve import Calibration, Design, Objective, Search, Study, StudyTask
from merganser.evolve.irt import IRT, fitting
from merganser.evolve.irt.fitting import fit
from merganser.evolve.preparation import split
from merganser.evolve.space import key
from merganser.evolve.summary import summarize

NAME = "items"
RESAMPLES = 1000


@dataclass(frozen=True)
class Replay:
    """The evaluator of a study that reads its answers."""

    rows: Mapping[str, np.ndarray]

    def __call__(self, candidate: Any, items: Mapping[str, Sequence[int]]) -> dict[str, Any]:
        row = self.rows[candidate if isinstance(candidate, str) else key(candidate)]
        return {name: row[list(chosen)] for name, chosen in items.items()}


#: Extractor and estimator by fitness; full evaluation asks everything.
FITNESS = {
    "mean": ("random", "naive"),
    "gmp-irt": ("random", "gmp-irt"),
    "mean, irt": ("irt", "naive"),
    "gp-irt, irt": ("irt", "gp-irt"),
    "gmp-irt, irt": ("irt", "gmp-irt"),
}


def task(pool: Pool, fitness: str, size: int | None) -> StudyTask:
    extractor, estimator = FITNESS.get(fitness, ("random", "naive"))
    return StudyTask(len(pool.strata), size, extractor, estimator, "adaptive" if estimator == "gmp-irt" else 0.5)


def unseen(pool: Pool, seed: int) -> np.ndarray:
    """Which items a study with this seed puts aside, whatever its fitness."""
    chosen = np.zeros(len(pool.strata), dtype=bool)
    chosen[split(NAME, task(pool, "full", None), seed).test] = True
    return chosen


@contextmanager
def fitted_once() -> Iterator[None]:
    """Searches with the same calibration share its IRT: fitting depends on nothing else."""
    known: dict[tuple[Any, ...], IRT] = {}

    def remembered(answers: np.ndarray, *, dimensions: int | None = None, seed: int = 0) -> IRT:
        key = (answers.tobytes(), answers.shape, dimensions, seed)
        if key not in known:
            known[key] = fit(answers, dimensions=dimensions, seed=seed)
        return known[key]

    with patch.object(fitting, "fit", remembered):
        yield


def measure_winners(
    setting: Setting, pool: Pool, sizes: Sequence[int], seeds: Sequence[int], population: int, generations: int
) -> dict[str, Any]:
    """By fitness and n: the winner's score on unseen items and on all, what it cost; means over seeds, and every run.

    A search with few questions and one with full evaluation put the same items aside, so what the former loses is a
    difference on the same items, seed by seed; `loss_error` is the standard error of its mean over seeds. It is within
    one error if it is no more than the bootstrap error of the full winner's score over all items, as large a benchmark
    as there is; over the unseen items alone (`unseen_error`) the error is larger, and would excuse more.
    """
    rows = {key(values): row for values, row in zip(setting.grid, pool.merges, strict=True)}
    replay = Replay(rows | dict(zip(setting.experts, pool.endpoints(setting), strict=True)))
    calibration = {NAME: Calibration(answers=pool.calibration(setting))}
    aside = {seed: unseen(pool, seed) for seed in seeds}
    kinds: list[tuple[str, int | None]] = [("full", None)]
    kinds += [(fitness, size) for size in sizes for fitness in FITNESS]
    found: dict[str, Any] = {}
    for fitness, size in kinds:
        runs = []
        for seed in seeds:
            design = Design(
                space=setting.space.parameters,
                tasks={NAME: task(pool, fitness, size)},
                objectives=(Objective.of(NAME),),
                models=dict.fromkeys(setting.experts, ""),
                search=Search(population=population, generations=generations, seed=seed, split_seed=seed, rerank=0),
            )
            with tempfile.TemporaryDirectory() as folder:
                study = Study.open(Path(folder, "study.sqlite"))
                winner = study.run(design, replay, calibration=calibration if size and fitness != "mean" else None)
                assert winner is not None
                assert winner.values is not None
                summary = summarize(study)
                study.close()
            row = rows[winner.label]
            runs.append(
                {
                    "weights": [winner.values[f"weight.{name}"] for name in setting.experts],
                    "score": float(row.mean()),
                    "test": summary.winners[0].test[NAME],
                    "bootstrap_error": bootstrap_error(row, seed),
                    "unseen_error": bootstrap_error(row[aside[seed]], seed),
                    "estimated": winner.objectives[NAME],
                    "asked": summary.cost.asked,
                    "calibration": summary.cost.calibration,
                    "full": summary.cost.full,
                    "saved_per_candidate": summary.cost.full / summary.cost.asked,
                    "saved": summary.cost.saved,
                }
            )
        label = fitness if size is None else f"{fitness} {size}"
        means = {name: float(np.mean([run[name] for run in runs])) for name in runs[0] if name != "weights"}
        found[label] = means | {"runs": runs}
    full = found["full"]
    reference = [run["test"] for run in full["runs"]]
    for each in found.values():
        each |= lost(reference, [run["test"] for run in each["runs"]])
        each["within_one_error"] = bool(each["loss"] <= full["bootstrap_error"])
    scores = pool.merges.mean(1)
    single = dict(zip(setting.experts, pool.endpoints(setting), strict=True))
    single["base"] = pool.others[pool.models.index("base")]
    return {
        "population": population,
        "generations": generations,
        "seeds": list(seeds),
        "grid": {"size": len(scores), "best": float(scores.max()), "mean": float(scores.mean())},
        "unseen": {
            "items": int(aside[seeds[0]].sum()),
            "covered": int(np.any(list(aside.values()), axis=0).sum()),
            "models": {
                name: {"runs": (tests := [float(row[aside[seed]].mean()) for seed in seeds]), **lost(reference, tests)}
                for name, row in single.items()
            },
        },
        "endpoints": {name: float(single[name].mean()) for name in setting.experts},
        "base": float(single["base"].mean()),
        "fitness": found,
    }


def lost(reference: Sequence[float], scores: Sequence[float]) -> dict[str, float]:
    """Mean of reference − score over seeds, and its standard error."""
    difference = np.subtract(reference, scores)
    error = difference.std(ddof=1) / len(difference) ** 0.5 if len(difference) > 1 else float("nan")
    return {"loss": float(difference.mean()), "loss_error": float(error)}


def bootstrap_error(row: np.ndarray, seed: int) -> float:
    drawn = np.random.default_rng(seed).integers(0, len(row), (RESAMPLES, len(row)))
    return float(row[drawn].mean(1).std())
