"""Two skills in one language model: a Pareto front, negative transfer against other merges, and few-shot prompts.

    python -m benchmarks.evolve_skills --base STORIES [--seed 0] [--quick] [--json FILE]

The fine-tunes of stories15M of `benchmarks.evolve_costs` are merged in several ways. Each is tuned on the same items of
the pool and scored on items that none of them saw, so that differences are paired item by item:

- `evolved`: TIES with a density, a scale and for each model a weight at two points of depth, by a genetic algorithm;
- `task arithmetic`, `TIES` and `SLERP`: a grid of their parameters;
- `few-shot`: the base with one to four solved questions before each question, and no merge;
- the front: the search of `evolved` with one objective per skill, by NSGA-II.

Negative transfer is the share of items that a model gets wrong among those that a fine-tune gets right.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

from benchmarks.evolve_costs import Setting, Way, load_setting
from benchmarks.evolve_transfer import transferred
from benchmarks.machine import describe
from benchmarks.records import record
from benchmarks.zoo.cards import add_locations
from benchmarks.zoo.language_skills import SKILLS, Skill, load_skill
from merganser.evolve import Design, Objective, SearchParameter, Space, Study
from merganser.evolve.design import BASE
from merganser.evolve.fitness import MergedModels
from merganser.evolve.intervals import objective_interval, paired_interval
from merganser.evolve.preparation import split

Answers: TypeAlias = "dict[str, np.ndarray]"
Items: TypeAlias = "Mapping[str, Sequence[int]]"
EVOLVED = "evolved"
#: Parameters of the merges that are tuned by a grid, and their values.
GRIDS: Mapping[str, tuple[str, Mapping[str, Sequence[float]]]] = {
    "task arithmetic": ("task_arithmetic", {"scale": np.linspace(0.1, 1.5, 15).round(2).tolist()}),
    "TIES": ("ties", {"density": [0.2, 0.5, 0.8, 1.0], "scale": [0.5, 0.8, 1.0, 1.2, 1.5, 2.0]}),
    "SLERP": ("slerp", {"t": np.linspace(0.0, 1.0, 13).round(3).tolist()}),
}
SHOTS = (1, 2, 4)


@dataclass(frozen=True)
class Tuned:
    """A model that was chosen on the pool: its values, how many were tried, its score there, and its answers."""

    values: Mapping[str, Any]
    tried: int
    pool: float
    answers: Answers


def score(answers: Mapping[str, Any], skills: Sequence[str]) -> float:
    return float(np.mean([np.mean(answers[skill]) for skill in skills]))


def tune(ask: Callable[[Any, Items], Answers], candidates: Sequence[Any], pool: Items, unseen: Items) -> Tuned:
    """The candidate with the best mean over skills on the pool, the first of equals, asked the unseen items."""
    scores = [score(ask(candidate, pool), list(pool)) for candidate in candidates]
    best = int(np.argmax(scores))
    return Tuned(candidates[best], len(candidates), scores[best], ask(candidates[best], unseen))


def grid(setting: Setting, name: str) -> tuple[MergedModels, list[dict[str, float]]]:
    """An evaluator of a method, and every combination of its values."""
    method, values = GRIDS[name]
    found = setting.evaluator()
    space = Space({key: SearchParameter(min(v), max(v)) for key, v in values.items()}, models=tuple(setting.experts))
    combined = [dict(zip(values, each, strict=True)) for each in itertools.product(*values.values())]
    template = {**found.template, "method": method}
    if method == "slerp":
        del template["base"]  # from one fine-tune to the other
    return replace(found, template=template, space=space), combined


@dataclass(frozen=True)
class FewShot:
    """The base, asked with solved questions of the training data before each question."""

    evaluate: MergedModels
    skills: Mapping[str, Skill]

    def __call__(self, candidate: Mapping[str, int], items: Items) -> Answers:
        model = self.evaluate.live.load(BASE)
        found = {}
        for name, chosen in items.items():
            shown = [
                {"question": each.prompt, "options": list(each.options), "answer": each.answer}
                for each in self.skills[name].train[:200]
            ]
            examiner = replace(self.evaluate.examiners[name], shots=candidate["shots"], examples=shown)  # type: ignore[type-var]
            with torch.inference_mode():
                found[name] = np.array(examiner(model, chosen)["score"])
        return found


def ask_with(evaluate: MergedModels, skills: Sequence[str]) -> Callable[[Any, Items], Answers]:
    def ask(candidate: Any, items: Items) -> Answers:
        found = evaluate(candidate, items)
        return {skill: np.array(found[skill]) for skill in skills}

    return ask


def evolve(design: Design, evaluate: MergedModels) -> tuple[list[Tuned], dict[str, Answers]]:
    """The winners of a study, and the answers of the models that they are compared with, to the unseen items."""
    skills = list(design.tasks)
    with tempfile.TemporaryDirectory() as folder, Study.open(Path(folder, "study.sqlite")) as study:
        study.run(design, evaluate)

        def tested(label: str) -> Answers:
            found = study.store.answers(study.store.trials("test", label)[-1])
            return {skill: found[skill].values for skill in skills}

        trials = study.pareto() if len(design.objectives) > 1 else [study.best()]
        tried = sum(trial.cached_from is None and trial.state == "done" for trial in study.trials())
        winners = []
        for trial in trials:
            pool = float(np.mean([trial.estimates[skill].value for skill in skills]))
            winners.append(Tuned(dict(trial.values or {}), tried, pool, tested(trial.label)))
        return winners, {label: tested(label) for label in (*design.endpoints, *design.references)}


def describe_model(answers: Answers, winner: Answers, endpoints: Mapping[str, Answers]) -> dict[str, dict[str, Any]]:
    """Scores by skill and their mean with intervals, the winner's gains over it, and its negative transfer."""
    skills = list(answers)
    objectives = {skill: Objective.of(skill) for skill in skills}
    objectives["mean"] = Objective("mean", {skill: 1 / len(skills) for skill in skills})
    known = np.array([np.concatenate([each[skill] for skill in skills]) == 1 for each in endpoints.values()])
    right = np.concatenate([answers[skill] for skill in skills])[None] == 1
    strata = [skill for skill in skills for _ in answers[skill]]
    best = int(known.mean(1).argmax())
    return {
        "scores": {name: asdict(objective_interval(each, answers)) for name, each in objectives.items()},
        "winner_gains": {name: asdict(paired_interval(each, winner, answers)) for name, each in objectives.items()},
        "transfer": transferred(right, np.ones_like(right), known, best, strata),
    }


def measure(setting: Setting, skills: Mapping[str, Skill], seed: int) -> dict[str, Any]:
    """Tune everything on the pool and score it on the unseen items."""
    began = time.process_time()
    design, evaluate = setting.design(Way(), seed), setting.evaluator()
    parts = {name: split(name, task, design.search.split_seed) for name, task in design.tasks.items()}
    pool = {name: part.pool.tolist() for name, part in parts.items()}
    unseen = {name: part.test.tolist() for name, part in parts.items()}
    (winner,), others = evolve(design, evaluate)
    tuned = {EVOLVED: winner}
    print(EVOLVED, winner.values, winner.pool, flush=True)
    for name in GRIDS:
        merged, candidates = grid(setting, name)
        tuned[name] = tune(ask_with(merged, list(skills)), candidates, pool, unseen)
        print(name, tuned[name].values, tuned[name].pool, flush=True)
    few = [{"shots": shots} for shots in SHOTS]
    tuned["few-shot"] = tune(FewShot(evaluate, skills), few, pool, unseen)
    both = tuple(Objective.of(name) for name in skills)
    search = replace(design.search, algorithm="nsga2")
    front, _ = evolve(replace(design, objectives=both, search=search), evaluate)
    endpoints = {name: others[name] for name in skills}
    models = {
        name: {"values": each.values, "tried": each.tried, "pool": each.pool}
        | describe_model(each.answers, winner.answers, endpoints)
        for name, each in tuned.items()
    }
    models |= {name: {"tried": 0, **describe_model(each, winner.answers, endpoints)} for name, each in others.items()}
    return {
        "models": models,
        "front": [
            {"values": each.values} | describe_model(each.answers, winner.answers, endpoints)
            for each in sorted(front, key=lambda each: each.answers[next(iter(skills))].mean())
        ],
        "pool": {name: len(each) for name, each in pool.items()},
        "unseen": {name: len(each) for name, each in unseen.items()},
        "trials": design.search.trials,
        "seconds": time.process_time() - began,
    }


def show(found: Mapping[str, Any]) -> None:
    print(f"{describe()}\nunseen items: {found['unseen']}; {found['seconds']:.0f} processor seconds")
    for name, row in found["models"].items():
        scores = "  ".join(f"{skill} {each['value']:.3f}" for skill, each in row["scores"].items())
        gain, lost = row["winner_gains"]["mean"], row["transfer"]["all"]
        print(
            f"{name:<17}{scores}  evolved gains {gain['value']:+.3f} ({gain['low']:+.3f} to {gain['high']:+.3f})"
            f"  transfer {lost['rate']:.3f} ± {lost['error']:.3f}"
        )
    for row in found["front"]:
        print("front  " + "  ".join(f"{skill} {each['value']:.3f}" for skill, each in row["scores"].items()))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, required=True, help="stories15M, as `benchmarks.zoo.stories` writes it")
    parser.add_argument("--skills", nargs=2, choices=SKILLS, default=["questions", "sources"])
    parser.add_argument("--items", type=int, default=300, help="of each skill")
    parser.add_argument("--pool", type=int, default=60, help="items of each skill that everything is tuned on")
    parser.add_argument("--population", type=int, default=6)
    parser.add_argument("--generations", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="1 generation, 40 items")
    parser.add_argument("--json", type=Path, metavar="FILE")
    add_locations(parser)
    options = parser.parse_args(arguments)
    if options.quick:
        options.generations, options.items, options.pool = 1, 40, 20
    torch.set_num_threads(1)
    skills = {name: load_skill(name, options.data) for name in options.skills}
    setting = load_setting(options, "ties")
    found = measure(setting, skills, options.seed)
    found["fine_tuning"] = setting.learned()
    show(found)
    record(options.json, found, [options.seed])


if __name__ == "__main__":
    main()
