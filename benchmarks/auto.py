"""Does the autopilot find what a full grid finds, with a tenth of the questions, and say no where it should?

    python -m benchmarks.auto [--cache ZOO] [--tasks NAME …] [--validation N] [--test N] [--seeds 0 1] [--json FILE]
    python -m benchmarks.auto --tasks questions sources intents --base STORIES [--json FILE]

Half an hour of one core for eight tasks (`--quick`: two methods, few sentences). The experts of `benchmarks.zoo.text`,
for tasks of images those of `benchmarks.zoo.image_experts`, or for skills of a language model those of
`benchmarks.zoo.stories_skills`, are merged by every method that `mg.tuning.auto` tries, at every scale of a grid, and
asked all validation questions. The autopilot gets the same experts and questions, and a tenth of the grid's as its
budget. Its winner and the grid's are compared on test questions that neither has seen. Then experts are spoilt in three
ways. What FILE holds of the same experts stays and is not measured again; with `--fresh` only its grid does.

Stored in `results`:

- `questions`: sentences, images or prompts; `tasks`; `validation` and `test`: how many of each task; `experts`: the
  validation accuracy of each expert on its own task;
- `grid`: of every method and scale the validation `accuracy`; `full`, the questions of the whole grid;
- `best`: `label`, validation and test accuracy of the best of the grid, and the standard `error` of the latter;
- `luck`: how far below that, on test questions, the best of the grid is on other samples of the validation questions
  (as many, drawn with replacement): what no search with so many questions can be sure to avoid;
- `runs`: of every seed the autopilot's `best` merge, what it `kept`, its `verdict`, the questions `asked` and their
  `share` of the grid's; `test`, the accuracy of its best merge, `behind`, how far that is below the grid's, and
  `paired`, the standard error of that difference;
- `spoilt`: of every set what was done (`set`), the `culprit`, and the autopilot's `verdict`, `remarks` and `text`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import merganser as mg
from benchmarks.experts import Experts, Part, State
from benchmarks.image_experts import load_image_experts
from benchmarks.language_experts import load_language_experts
from benchmarks.records import record
from benchmarks.text_experts import load_experts
from benchmarks.zoo.cards import add_locations
from benchmarks.zoo.image_tasks import IMAGE_TASKS
from benchmarks.zoo.language_skills import SKILLS
from benchmarks.zoo.text_tasks import TASKS
from merganser.errors import InputError
from merganser.evaluate.search import ALPHAS
from merganser.evolve.intervals import objective_error
from merganser.evolve.objectives import Objective
from merganser.methods.registry import registry
from merganser.tuning.autopilot.contenders import METHODS

AnyExperts = Experts[Any]
Answers = dict[str, np.ndarray]

#: The scales of the grid: the usual ones, and beyond, where flat spectra are best.
SCALES = (*ALPHAS, 2.4, 2.8, 3.2)
#: Of the sets that are spoilt: what is wrong with them shows with one method and few questions.
SPOILT_METHODS, SPOILT_BUDGET = ("task_arithmetic",), 3000
#: Samples of the validation questions.
SAMPLES = 40


def right(experts: AnyExperts, weights: State, items: Mapping[str, Sequence[int]], part: Part) -> Answers:
    """Return whether a network answers some questions of every task."""
    answers = experts.ask({**experts.base, **weights}, items, part)
    return {task: own.numpy().astype(float) for task, own in answers.items()}


def mean(answers: Answers) -> float:
    return float(np.mean([own.mean() for own in answers.values()]))


def own_accuracies(experts: AnyExperts) -> dict[str, float]:
    """Return the validation accuracy of each expert on its own task."""
    return {
        name: mean(right(experts, expert, {name: range(len(experts.tasks[name].validation))}, "validation"))
        for name, expert in experts.experts.items()
    }


def measure_grid(experts: AnyExperts, methods: Sequence[str], scales: Sequence[float]) -> dict[str, Any]:
    """Return the validation accuracy of every method at every scale, and how lucky the best of them is."""
    everything = {name: range(len(task.validation)) for name, task in experts.tasks.items()}
    rows: list[dict[str, Any]] = []
    answers: list[Answers] = []
    for method in methods:
        vector = experts.task_vector(method, list(experts.experts))
        for scale in scales:
            answers.append(right(experts, experts.weights(vector, scale), everything, "validation"))
            rows.append({"method": method, "scale": scale, "accuracy": mean(answers[-1])})
        best = max((row for row in rows if row["method"] == method), key=lambda row: row["accuracy"])
        print(f"grid: {method} {best['accuracy']:.4f} at scale {best['scale']:g}", flush=True)
    return {"grid": rows, "luck": measure_luck(experts, rows, answers, grid_answers(experts, best_of(rows)))}


def measure_luck(
    experts: AnyExperts, grid: Sequence[Mapping[str, Any]], answers: Sequence[Answers], best: Answers
) -> list[float]:
    """Return how far the best of the grid on random samples of the questions is behind, on test questions."""
    draw, winners = np.random.default_rng(0), []
    for _ in range(SAMPLES):
        chosen = {task: draw.integers(len(own), size=len(own)) for task, own in answers[0].items()}
        scores = [mean({task: each[task][own] for task, own in chosen.items()}) for each in answers]
        winners.append(int(np.argmax(scores)))
    found = {winner: mean(grid_answers(experts, grid[winner])) for winner in dict.fromkeys(winners)}
    return [mean(best) - found[winner] for winner in winners]


def pilot(experts: AnyExperts, models: Mapping[str, State], **options: Any) -> Any:
    """Return the autopilot's decision on experts by the validation questions."""
    items = {name: len(task.validation) for name, task in experts.tasks.items()}
    score = lambda weights, chosen: right(experts, weights, chosen, "validation")  # noqa: E731
    return mg.tuning.auto(models, experts.trained, score=score, items=items, **options)[1]


def test_answers(experts: AnyExperts, recipe: Mapping[str, Any]) -> Answers:
    """Return the answers of a recipe to all test questions."""
    everything = {name: range(len(task.test)) for name, task in experts.tasks.items()}
    settings = dict(recipe["parameters"])
    scale = settings.pop("scale")
    vector = experts.task_vector(recipe["method"], [model["path"] for model in recipe["models"]], **settings)
    return right(experts, experts.weights(vector, scale), everything, "test")


def grid_answers(experts: AnyExperts, row: Mapping[str, Any]) -> Answers:
    """Return the answers of one of the grid to all test questions."""
    models = [{"path": name} for name in experts.experts]
    return test_answers(experts, {"method": row["method"], "models": models, "parameters": {"scale": row["scale"]}})


def best_of(grid: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return max(grid, key=lambda row: row["accuracy"])


def known(path: Path | None, about: Mapping[str, Any], experts: AnyExperts) -> dict[str, Any]:
    """Return the results of a file of the same tasks, if the best of its grid answers as it did then."""
    if path is None or not path.exists():
        return {}
    found: dict[str, Any] = json.loads(path.read_text())["results"]
    same = all(found.get(key, value) == value for key, value in about.items())
    return found if same and mean(grid_answers(experts, best_of(found["grid"]))) == found["best"]["test"] else {}


def compare(experts: AnyExperts, decision: Any, best: Answers, full: int, seed: int) -> dict[str, Any]:
    """Return one run of the autopilot beside the best of the grid, on test questions."""
    own = test_answers(experts, decision.best_recipe)
    variance = sum(float((best[task] - own[task]).var(ddof=1)) / len(own[task]) for task in own) / len(own) ** 2
    return {
        "seed": seed,
        "best": decision.best,
        "kept": decision.kept,
        "verdict": decision.verdict,
        "asked": decision.asked,
        "share": decision.asked / full,
        "test": mean(own),
        "behind": mean(best) - mean(own),
        "paired": variance**0.5,
    }


def stretch(expert: State, base: State) -> State:
    return {name: base[name] + 20 * (tensor - base[name]) for name, tensor in expert.items()}


def shuffle(expert: State, base: State) -> State:
    """Return the expert's values in random places: a network that has nothing to do with the base."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: tensor.flatten()[torch.randperm(tensor.numel(), generator=generator)].view_as(tensor)
        for name, tensor in expert.items()
    }


SPOILT: Mapping[str, Callable[[State, State], State]] = {
    "an expert of another base": shuffle,
    "a duplicate": lambda expert, base: dict(expert),
    "an expert with 20 times the norm": stretch,
}


def spoil(experts: AnyExperts, what: str) -> dict[str, Any]:
    """Return what the autopilot says of the experts when one of them is spoilt, or comes twice."""
    models = {name: dict(expert) for name, expert in experts.experts.items()}
    culprit = list(models)[-1]
    name = "again" if what == "a duplicate" else culprit
    models[name] = SPOILT[what](models[culprit], experts.trained)
    decision = pilot(experts, models, methods=SPOILT_METHODS, budget=SPOILT_BUDGET)
    remarks = [{"kind": r.kind, "experts": list(r.experts), "text": r.text} for r in decision.remarks]
    return {
        "set": what,
        "culprit": name,
        "verdict": decision.verdict,
        "kept": decision.kept,
        "remarks": remarks,
        "text": decision.text,
    }


def loader(names: Sequence[str], base: Path | None) -> tuple[str, Callable[..., AnyExperts]]:
    """Return what the questions of these tasks are, and the function that loads their experts."""
    if set(names) <= set(IMAGE_TASKS):
        return "images", load_image_experts
    if set(names) <= set(SKILLS):
        if base is None:
            raise InputError("skills of a language model need --base, the directory of stories15M")
        return "prompts", partial(load_language_experts, base)
    return "sentences", load_experts


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", metavar="NAME", help="some tasks of one zoo (default: all text tasks)")
    parser.add_argument("--base", type=Path, help="stories15M, as `benchmarks.zoo.stories` writes it, for skills")
    parser.add_argument("--validation", type=int, default=64, help="validation questions of each task")
    parser.add_argument("--test", type=int, default=200, help="test questions of each task")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1], help="orders of the questions")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--fresh", action="store_true", help="run the autopilot again, beside the grid in the file")
    add_locations(parser)
    options = parser.parse_args(arguments)
    names, test, validation = (
        (TASKS[:3], 40, 18) if options.quick else (options.tasks or TASKS, options.test, options.validation)
    )
    methods = ("task_arithmetic", "tsv") if options.quick else [name for name in METHODS if name in registry()]
    scales = (0.5, 1.0) if options.quick else SCALES
    questions, load = loader(names, options.base)
    experts = load(options.cache, options.data, names, test=test, validation=validation)
    about: dict[str, Any] = {
        "questions": questions,
        "tasks": list(names),
        "validation": {name: len(task.validation) for name, task in experts.tasks.items()},
        "test": {name: len(task.test) for name, task in experts.tasks.items()},
    }
    results = known(options.json, about, experts)
    if options.fresh or not results:
        results = {**(results or about | measure_grid(experts, methods, scales)), "runs": [], "spoilt": []}
    grid = results["grid"]
    results["experts"] = own_accuracies(experts)
    results["full"] = full = len(grid) * sum(results["validation"].values())
    first = best_of(grid)
    best = grid_answers(experts, first)
    results["best"] = {
        "label": f"{first['method']} scale={first['scale']:g}",
        "validation": first["accuracy"],
        "test": mean(best),
        "error": objective_error(Objective("mean", {task: 1 / len(best) for task in best}), best),
    }
    record(options.json, results, seeds_of(results), added=True)
    done = {run["seed"] for run in results["runs"]}
    for seed in options.seeds[:1] if options.quick else options.seeds:
        if seed in done:
            continue
        decision = pilot(
            experts, experts.experts, methods=methods, budget=None if options.quick else full // 10, seed=seed
        )
        results["runs"].append(compare(experts, decision, best, full, seed))
        print(
            "seed {seed}: {best}, {share:.1%} of the grid, {behind:+.4f} behind".format(**results["runs"][-1]),
            flush=True,
        )
        record(options.json, results, seeds_of(results), added=True)
    for what in SPOILT:
        if all(row["set"] != what for row in results["spoilt"]):
            results["spoilt"].append(spoil(experts, what))
            print("{set}: {verdict}; {text}".format(**results["spoilt"][-1]), flush=True)
            record(options.json, results, seeds_of(results), added=True)


def seeds_of(results: Mapping[str, Any]) -> list[int]:
    return [run["seed"] for run in results["runs"]]


if __name__ == "__main__":
    main()
