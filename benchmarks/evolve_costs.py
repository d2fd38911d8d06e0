"""What a winner costs end to end: whole studies of real language models, every processor second counted.

    python -m benchmarks.evolve_costs --base STORIES [--seeds 3] [--method ties] [--workers 2] [--quick] [--json FILE]

Two fine-tunes of stories15M (`benchmarks.zoo.stories_skills`, trained if they are missing), each with a skill that the
other lacks, are merged and scored by the mean of both skills. For each model a weight at two points of depth is
searched (with TIES also density and scale). Every way of judging candidates runs as a study of its own, from opening
the checkpoints to the winner, in one thread:

- `full, before` and `gmp-irt, before`: all items, or 20 of each task and an IRT fitted to the endpoints' answers; every
  option is asked as a whole sequence, and there is no race and no re-ranking;
- `full` and `gmp-irt`: the same with shared prompts and the same answers. `full, before` therefore runs only its first
  generation, and its cost is multiplied by their number: each asks as many candidates the same items;
- `race`: what `merganser evolve init` writes (shared prompts, race, the best three re-ranked);
- `race, soft`: compared by the probability of the right option, on fewer items.

Winners are scored on items that no search sees, the same for all ways and seeds, so that differences are paired. These
questions are the measurement and not a cost of the search; they are counted apart. Goal: the winner of `full` within
one standard error, at a fifth of the seconds of `full, before` and a third of those of `gmp-irt, before`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
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
from merganser.evolve.costs import Event
from merganser.evolve.design import BASE
from merganser.evolve.examining import draw_test_items
from merganser.evolve.fitness import MergedModels
from merganser.evolve.population import initial_population

FULL_BEFORE, IRT_BEFORE, FULL = "full, before", "gmp-irt, before", "full"
#: Where seconds go.
PARTS = ("merging", "calibration", "search", "rerank", "testing")


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
    FULL_BEFORE: Way(whole=True),
    IRT_BEFORE: Way(whole=True, subset=20, estimator="gmp-irt"),
    FULL: Way(),
    "gmp-irt": Way(subset=20, estimator="gmp-irt"),
    "race": Way(subset=60, race=5, rerank=3),
    "race, soft": Way(subset=30, race=5, rerank=3, measure=".soft"),
    "race, soft, 20 items": Way(subset=20, race=10, rerank=3, measure=".soft"),
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
    method: str

    @property
    def space(self) -> Space:
        parameters = {"weight": SearchParameter(0.0, 1.5, per="model", points=2)}
        if self.method == "ties":
            parameters |= {"density": SearchParameter(0.1, 1.0), "scale": SearchParameter(0.5, 2.0)}
        return Space(parameters, models=tuple(self.experts))

    def learned(self) -> dict[str, dict[str, float]]:
        """What fine-tuning gained, and at which rate, by skill."""
        cards = {name: read_card(directory) for name, directory in self.experts.items()}
        return {
            name: card.guards | card.scores | {"rate": card.training["rate"]} for name, card in cards.items() if card
        }

    def design(self, way: Way, seed: int) -> Design:
        tasks = {}
        for name, examiner in self.examiners.items():
            subset = way.subset if way.subset and way.subset < self.pool else None
            test = draw_test_items(name, examiner, 1 - self.pool / len(examiner), 0)
            tasks[name] = StudyTask(len(examiner), subset, estimator=way.estimator, c="adaptive", test_items=test)
        return Design(
            space=self.space.parameters,
            tasks=tasks,
            objectives=(Objective("mean", {f"{name}{way.measure}": 1 / len(tasks) for name in tasks}),),
            models={name: str(path) for name, path in self.experts.items()},
            base=str(self.base),
            search=Search(
                population=self.population, generations=self.generations, seed=seed, race=way.race, rerank=way.rerank
            ),
            starts=initial_population(self.space, self.method, {}, self.population),
        )

    def evaluator(self) -> MergedModels:
        transformers = require("transformers", "hf")
        template = {
            "method": self.method,
            "base": str(self.base),
            "models": [{"path": str(path)} for path in self.experts.values()],
        }
        load = partial(transformers.AutoModelForCausalLM.from_pretrained, self.base, dtype=torch.float32)
        return MergedModels(load, template, self.space, self.examiners)


def load_setting(options: argparse.Namespace, method: str) -> Setting:
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
        method,
    )


@dataclass
class Meter:
    """An evaluator that counts its processor seconds; with `whole`, every option is a sequence of its own."""

    evaluate: MergedModels
    whole: bool
    unseen: Mapping[str, frozenset[int]]
    answers: Path
    phase: str = "calibration"
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))

    def note(self, event: Event) -> None:
        """Follow the study from calibration to search to re-ranking."""
        if event.phase == "search":
            self.phase = "rerank" if event.done == event.total else "search"

    def test(self, candidate: Any, items: Mapping[str, Sequence[int]]) -> Mapping[str, Sequence[float]]:
        """Answer unseen items; endpoints, which all studies test, only once. Nothing else is cached: it has a cost."""
        with patch.object(self.evaluate, "answers", str(self.answers)):
            return self.evaluate(candidate, items)

    def __call__(self, candidate: Any, items: Mapping[str, Sequence[int]]) -> Mapping[str, Sequence[float]]:
        began = time.process_time()
        if all(self.unseen[task].issuperset(chosen) for task, chosen in items.items()):
            answers = self.test(candidate, items)
            self.seconds["testing"] += time.process_time() - began
            return answers
        self.evaluate.live.load(candidate)
        merged = time.process_time()
        with patch.object(examiners, "score_continuations", score_whole) if self.whole else nullcontext():
            answers = self.evaluate(candidate, items)
        self.seconds["merging"] += merged - began
        self.seconds[self.phase] += time.process_time() - merged
        return answers


def warm_up(setting: Setting) -> None:
    """Do what a process does once, such as imports, which belongs to no way."""
    torch.set_num_threads(1)
    setting.design(WAYS[FULL], 0)
    setting.evaluator()({v.name: 0.5 for v in setting.space.variables}, {name: range(4) for name in setting.experts})


def run(setting: Setting, way: Way, seed: int, scale: int = 1) -> dict[str, Any]:
    """One study from nothing to its winner: processor seconds, questions, and the winner's answers to unseen items.

    With `scale`, one generation is run, and what it cost is multiplied.
    """
    began = time.process_time()
    design = setting.design(way, seed)
    if scale > 1:
        design = replace(design, search=replace(design.search, generations=1))
    unseen = {name: frozenset(task.test_items or ()) for name, task in design.tasks.items()}
    meter = Meter(setting.evaluator(), way.whole, unseen, setting.cache / "evolve-costs-answers.sqlite")
    with tempfile.TemporaryDirectory() as folder, Study.open(Path(folder, "study.sqlite")) as study:
        winner = study.run(design, meter, on_event=meter.note)
        seconds = time.process_time() - began - meter.seconds["testing"]
        assert winner is not None
        cost = study.cost()
        rows = {label: _tested(study, label) for label in (winner.label, *setting.experts, BASE)}
        stopped = sum(trial.stopped is not None and trial.cached_from is None for trial in study.trials())
    row = rows.pop(winner.label)
    others = {label: float(answers.mean()) for label, answers in rows.items()}
    spent = meter.seconds
    asking = sum(spent[part] for part in ("calibration", "search", "rerank"))
    return {
        "seed": seed,
        "values": dict(winner.values or {}),
        "answers": row.tolist(),
        "test": float(row.mean()),
        "others": others,
        "gain": describe_difference(row - rows[max(others, key=lambda label: others[label])]),
        "questions": scale * (cost.asked + cost.calibration + cost.again),
        "models": scale * cost.models,
        "stopped": stopped,
        "seconds": scale * seconds,
        **{part: scale * each for part, each in spent.items()},
        "asking": scale * asking,
        "machinery": scale * (seconds - spent["merging"] - asking),
    }


def _tested(study: Study, label: str) -> np.ndarray:
    """Answers to the unseen items of all tasks."""
    tested = study.store.answers(study.store.trials("test", label)[-1])
    return np.concatenate([tested[name].values for name in study.design.tasks])


def describe_difference(difference: np.ndarray) -> dict[str, Any]:
    """Mean of differences item by item, its standard error and 95 % interval."""
    mean, error = float(difference.mean()), float(difference.std(ddof=1) / len(difference) ** 0.5)
    return {"mean": mean, "error": error, "interval": [mean - 1.96 * error, mean + 1.96 * error]}


def compare(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Means over seeds, and by how much each way's winners are below those of full evaluation, item by item."""
    reference = {each["seed"]: np.array(each["answers"]) for each in runs[FULL]}
    score, unseen = float(np.mean(list(reference.values()))), len(next(iter(reference.values())))
    rows: dict[str, Any] = {}
    for name, found in runs.items():
        means = {
            key: float(np.mean([each[key] for each in found]))
            for key in found[0]
            if isinstance(found[0][key], (int, float)) and key != "seed"
        }
        if name == FULL_BEFORE:
            means["test"] = score
        own = reference.items() if name == FULL_BEFORE else ((each["seed"], each["answers"]) for each in found)
        loss = np.mean([reference[seed] - np.array(answers) for seed, answers in own], 0)
        told = describe_difference(loss)
        rows[name] = means | {
            "loss": told["mean"],
            "loss_error": told["error"],
            "interval": told["interval"],
            "models_per_hour": 3600 * means["models"] / means["seconds"],
            "runs": [{key: value for key, value in each.items() if key != "answers"} for each in found],
        }
    for row in rows.values():
        row["fewer_than_full"] = rows[FULL_BEFORE]["seconds"] / row["seconds"]
        row["fewer_than_gmp_irt"] = rows[IRT_BEFORE]["seconds"] / row["seconds"]
    return {"ways": rows, "unseen": unseen, "standard_error": (score * (1 - score) / unseen) ** 0.5}


def show(found: Mapping[str, Any]) -> None:
    columns = ("merging", "calibration", "search", "rerank", "machinery", "seconds")
    print(f"{describe()}\n{'way':<21}{'unseen':>8}{'loss':>9}{'95 % interval':>19}{'questions':>11}", end="")
    print("".join(f"{column:>12}" for column in columns) + f"{'full/':>8}{'gmp/':>7}")
    for name, row in found["ways"].items():
        low, high = row["interval"]
        print(
            f"{name:<21}{row['test']:>8.4f}{row['loss']:>9.4f}{f'{low:+.4f} to {high:+.4f}':>19}"
            f"{row['questions']:>11.0f}"
            + "".join(f"{row[column]:>12.1f}" for column in columns)
            + f"{row['fewer_than_full']:>7.1f}×{row['fewer_than_gmp_irt']:>6.1f}×"
        )
    for run in found["ways"][FULL]["runs"]:
        low, high = run["gain"]["interval"]
        gain = f"{run['gain']['mean']:+.4f}, {low:+.4f} to {high:+.4f}"
        print(f"seed {run['seed']}: full gains over the best endpoint: {gain}")
    print(f"one standard error of a score over {found['unseen']} items: {found['standard_error']:.4f}", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, required=True, help="stories15M, as `benchmarks.zoo.stories` writes it")
    parser.add_argument("--skills", nargs="+", choices=SKILLS, default=["questions", "intents"])
    parser.add_argument("--items", type=int, default=300, help="of each skill")
    parser.add_argument("--pool", type=int, default=100, help="items of each skill that are searched on")
    parser.add_argument("--method", choices=["task_arithmetic", "ties"], default="task_arithmetic")
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
    setting = load_setting(options, options.method)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in WAYS}
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.workers, spawn, initializer=warm_up, initargs=(setting,)) as pool:
        jobs = {
            (seed, name): pool.submit(run, setting, WAYS[name], seed, options.generations if name == FULL_BEFORE else 1)
            for seed in range(options.seeds)
            for name in WAYS
            if name != FULL_BEFORE or seed == 0
        }
        for (seed, name), job in jobs.items():
            runs[name].append(job.result())
            print(seed, name, {k: v for k, v in runs[name][-1].items() if k not in ("answers", "values")}, flush=True)
            if name != list(WAYS)[-1]:
                continue
            found = compare(runs) | {
                "pool": options.pool * len(setting.experts),
                "trials": options.population * options.generations,
                "method": setting.method,
                "fine_tuning": setting.learned(),
            }
            show(found)
            record(options.json, found, range(seed + 1))


if __name__ == "__main__":
    main()
