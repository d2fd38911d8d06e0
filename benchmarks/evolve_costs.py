"""What a winner costs end to end: whole studies of real language models, every processor second counted.

    python -m benchmarks.evolve_costs --base STORIES [--seeds 3] [--workers 2] [--quick] [--json FILE]

Two fine-tunes of stories15M (`benchmarks.zoo.stories_skills`, trained if they are missing) are merged by TIES: density,
scale, and for each model a weight at two points of depth are searched. Every way of judging candidates runs as a study
of its own, from opening the checkpoints to the winner, in one thread:

- `full, before` and `gmp-irt, before`: all items, or 20 of each task and an IRT fitted to the endpoints' answers; every
  option is asked as a whole sequence, and there is no race and no re-ranking;
- `full`: the same with shared prompts;
- `race`: what `merganser evolve init` writes (shared prompts, race, the best three re-ranked);
- `race, soft`: 30 items of each task, compared by the probability of the right option.

Winners are scored on items that no search sees, the same for all ways and seeds, so that differences are paired. These
questions are the measurement and not a cost of the search; they are counted apart. Goal: the winner of `full, before`
within one standard error, at a fifth of its seconds and a third of those of `gmp-irt, before`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from benchmarks.machine import describe
from benchmarks.records import record
from benchmarks.zoo.cards import add_locations, read_card
from benchmarks.zoo.language_skills import SKILLS, load_skill
from benchmarks.zoo.stories_skills import Schedule, examine, train
from merganser.errors import require
from merganser.evaluate import examiners
from merganser.evaluate.likelihoods import score_whole
from merganser.evolve import Design, Objective, Search, SearchParameter, Space, Study, StudyTask
from merganser.evolve.fitness import MergedModels
from merganser.evolve.population import initial_population
from merganser.evolve.preparation import split
from merganser.evolve.summary import summarize

METHOD = "ties"
FULL, IRT = "full, before", "gmp-irt, before"


@dataclass(frozen=True)
class Way:
    """How candidates are judged."""

    whole: bool = False
    subset: int | None = None
    estimator: str = "naive"
    race: int = 0
    rerank: int = 0
    measure: str = ""


WAYS = {
    FULL: Way(whole=True),
    IRT: Way(whole=True, subset=20, estimator="gmp-irt"),
    "full": Way(),
    "race": Way(subset=60, race=5, rerank=3),
    "race, soft": Way(subset=30, race=5, rerank=3, measure=".soft"),
}


@dataclass(frozen=True)
class Setting:
    """Models, items of each skill and how many of them are searched on, and the size of the search."""

    base: Path
    experts: Mapping[str, Path]
    examiners: Mapping[str, examiners.MultipleChoice]
    pool: int
    population: int
    generations: int
    cache: Path

    @property
    def space(self) -> Space:
        parameters = {
            "weight": SearchParameter(0.0, 1.5, per="model", points=2),
            "density": SearchParameter(0.1, 1.0),
            "scale": SearchParameter(0.5, 2.0),
        }
        return Space(parameters, models=tuple(self.experts))

    def learned(self) -> dict[str, dict[str, float]]:
        """What fine-tuning gained, by skill."""
        cards = {name: read_card(directory) for name, directory in self.experts.items()}
        return {name: card.guards | card.scores for name, card in cards.items() if card}

    def design(self, way: Way, seed: int) -> Design:
        tasks = {}
        for name, examiner in self.examiners.items():
            subset = way.subset if way.subset and way.subset < self.pool else None
            share = 1 - self.pool / len(examiner)
            tasks[name] = StudyTask(len(examiner), subset, estimator=way.estimator, c="adaptive", test=share)
        return Design(
            space=self.space.parameters,
            tasks=tasks,
            objectives=(Objective("mean", {f"{name}{way.measure}": 1 / len(tasks) for name in tasks}),),
            models={name: str(path) for name, path in self.experts.items()},
            base=str(self.base),
            search=Search(
                population=self.population, generations=self.generations, seed=seed, race=way.race, rerank=way.rerank
            ),
            starts=initial_population(self.space, METHOD, {}, self.population),
        )

    def evaluator(self) -> MergedModels:
        transformers = require("transformers", "hf")
        template = {
            "method": METHOD,
            "base": str(self.base),
            "models": [{"path": str(path)} for path in self.experts.values()],
        }
        load = partial(transformers.AutoModelForCausalLM.from_pretrained, self.base, dtype=torch.float32)
        answers = str(self.cache / "evolve-costs-answers.sqlite")
        return MergedModels(load, template, self.space, self.examiners, answers)


def load_setting(options: argparse.Namespace) -> Setting:
    """The setting of a command line; fine-tunes that are missing are trained."""
    base, skills = options.base.resolve(), {name: load_skill(name, options.data) for name in options.skills}
    return Setting(
        base,
        {name: train(skill, base, options.cache, 0, Schedule()) for name, skill in skills.items()},
        {name: examine(skill, base, options.items) for name, skill in skills.items()},
        options.pool,
        options.population,
        options.generations,
        options.cache,
    )


@dataclass
class Meter:
    """An evaluator that counts its processor seconds; without `whole`, options share their prompt."""

    evaluate: MergedModels
    whole: bool
    unseen: Mapping[str, frozenset[int]]
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("merging", "asking", "testing"), 0.0))

    def __call__(self, candidate: Any, items: Mapping[str, Sequence[int]]) -> Mapping[str, Sequence[float]]:
        began = time.process_time()
        if all(self.unseen[task].issuperset(chosen) for task, chosen in items.items()):
            answers = self.evaluate(candidate, items)
            self.seconds["testing"] += time.process_time() - began
            return answers
        self.evaluate.live.load(candidate)
        merged = time.process_time()
        with patch.object(examiners, "score_continuations", score_whole) if self.whole else nullcontext():
            answers = self.evaluate(candidate, items)
        self.seconds["merging"] += merged - began
        self.seconds["asking"] += time.process_time() - merged
        return answers


def warm_up(setting: Setting) -> None:
    """Do what a process does once, such as imports, which belongs to no way."""
    torch.set_num_threads(1)
    setting.design(WAYS[FULL], 0)
    setting.evaluator()({v.name: 0.5 for v in setting.space.variables}, {name: range(4) for name in setting.experts})


def run(setting: Setting, way: Way, seed: int) -> dict[str, Any]:
    """One study from nothing to its winner: processor seconds, questions, and the winner's answers to unseen items."""
    began = time.process_time()
    design = setting.design(way, seed)
    split_seed = design.search.split_seed
    unseen = {name: frozenset(split(name, task, split_seed).test.tolist()) for name, task in design.tasks.items()}
    meter = Meter(setting.evaluator(), way.whole, unseen)
    with tempfile.TemporaryDirectory() as folder, Study.open(Path(folder, "study.sqlite")) as study:
        winner = study.run(design, meter)
        seconds = time.process_time() - began - meter.seconds["testing"]
        assert winner is not None
        summary = summarize(study)
        tested = study.store.answers(study.store.trials("test", winner.label)[-1])
        row = np.concatenate([tested[name].values for name in setting.experts])
        stopped = sum(trial.stopped is not None and trial.cached_from is None for trial in study.trials())
    cost = summary.cost
    return {
        "values": dict(winner.values or {}),
        "answers": row.tolist(),
        "test": float(row.mean()),
        "others": {
            label: float(np.mean([other.test[name] for name in setting.experts]))
            for label, other in summary.endpoints.items()
        },
        "questions": cost.asked + cost.calibration + cost.again,
        "models": cost.models,
        "stopped": stopped,
        "seconds": seconds,
        "merging": meter.seconds["merging"],
        "asking": meter.seconds["asking"],
        "machinery": seconds - meter.seconds["merging"] - meter.seconds["asking"],
        "testing": meter.seconds["testing"],
    }


def compare(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Means over seeds, and by how much each way's winners are below those of full evaluation, item by item."""
    reference = np.array([each["answers"] for each in runs[FULL]])
    score = float(reference.mean())
    rows: dict[str, Any] = {}
    for name, found in runs.items():
        means = {
            key: float(np.mean([each[key] for each in found]))
            for key in found[0]
            if isinstance(found[0][key], (int, float))
        }
        loss = (reference[: len(found)] - np.array([each["answers"] for each in found])).mean(0)
        error = float(loss.std(ddof=1) / len(loss) ** 0.5)
        rows[name] = means | {
            "loss": float(loss.mean()),
            "loss_error": error,
            "interval": [float(loss.mean() - 1.96 * error), float(loss.mean() + 1.96 * error)],
            "models_per_hour": 3600 * means["models"] / means["seconds"],
            "runs": [{key: value for key, value in each.items() if key != "answers"} for each in found],
        }
    for row in rows.values():
        row["fewer_than_full"] = rows[FULL]["seconds"] / row["seconds"]
        row["fewer_than_gmp_irt"] = rows[IRT]["seconds"] / row["seconds"]
    return {
        "ways": rows,
        "unseen": reference.shape[1],
        "standard_error": (score * (1 - score) / reference.shape[1]) ** 0.5,
    }


def show(found: Mapping[str, Any]) -> None:
    print(
        f"{describe()}\n{'way':<17}{'unseen':>8}{'loss':>9}{'95 % interval':>19}{'questions':>11}{'seconds':>9}", end=""
    )
    print(f"{'merging':>9}{'asking':>8}{'rest':>7}{'models/h':>10}{'full/':>8}{'gmp/':>8}")
    for name, row in found["ways"].items():
        low, high = row["interval"]
        print(
            f"{name:<17}{row['test']:>8.4f}{row['loss']:>9.4f}{f'{low:+.4f} to {high:+.4f}':>19}"
            f"{row['questions']:>11.0f}"
            f"{row['seconds']:>9.1f}{row['merging']:>9.1f}{row['asking']:>8.1f}{row['machinery']:>7.1f}"
            f"{row['models_per_hour']:>10.0f}{row['fewer_than_full']:>7.1f}×{row['fewer_than_gmp_irt']:>7.1f}×"
        )
    print(f"one standard error of a score over {found['unseen']} items: {found['standard_error']:.4f}", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, required=True, help="stories15M, as `benchmarks.zoo.stories` writes it")
    parser.add_argument("--skills", nargs="+", choices=SKILLS, default=["questions", "sources"])
    parser.add_argument("--items", type=int, default=300, help="of each skill")
    parser.add_argument("--pool", type=int, default=40, help="items of each skill that are searched on")
    parser.add_argument("--population", type=int, default=6)
    parser.add_argument("--generations", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=1, help="studies that run at once, each in one thread")
    parser.add_argument("--quick", action="store_true", help="1 seed, 1 generation, 40 items")
    parser.add_argument("--json", type=Path, metavar="FILE")
    add_locations(parser)
    options = parser.parse_args(arguments)
    if options.quick:
        options.seeds, options.generations, options.items, options.pool = 1, 1, 40, 25
    setting = load_setting(options)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in WAYS}
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.workers, spawn, initializer=warm_up, initargs=(setting,)) as pool:
        jobs = {
            (seed, name): pool.submit(run, setting, WAYS[name], seed)
            for seed in range(options.seeds)
            for name in reversed(WAYS)  # the cheap ones first
        }
        for (seed, name), job in jobs.items():
            runs[name].append(job.result())
            print(seed, name, {k: v for k, v in runs[name][-1].items() if k not in ("answers", "values")}, flush=True)
            if name != FULL:
                continue
            found = compare(runs) | {
                "pool": options.pool * len(setting.experts),
                "trials": options.population * options.generations,
                "fine_tuning": setting.learned(),
            }
            show(found)
            record(options.json, found, range(seed + 1))


if __name__ == "__main__":
    main()
