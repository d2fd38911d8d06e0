"""How much of the distance between the autopilot and a full grid is luck? Exams where the truth is known.

    python -m benchmarks.auto_simulations [--runs N] [--zoos NAME …] [--json FILE]

Two minutes of one core for all zoos; what FILE holds of other zoos than these stays. The true accuracy of every method
over its scale is that of a grid in `auto`, `auto_images` or `auto_language`, smoothed. A merge answers a question right
if

    √.55 z + √.25 w + √.2 e(s) < Φ⁻¹(accuracy),

all standard normal: z is the difficulty of the question, w that for the method, and e(s) changes with the scale, by a
correlation of 0.93 for every eighth of an octave. At an accuracy of 0.9, 4 % of the answers then differ a quarter of an
octave apart, 10 % an octave apart, and 15 % between methods, about as in measured pairs. Every run has questions and an
order of its own, as many as the measured exam. The autopilot may ask a tenth of what the grid asks.

Stored in `results`, by zoo: the standard `error` of the measured test accuracy, and by run, in shares of true accuracy,
how far the best of the `grid` and the best of the `autopilot` are below the best merge.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import ndtri

from benchmarks.records import record, stored
from merganser.tuning.autopilot.answers import AnswerJournal, Scoreboard
from merganser.tuning.autopilot.budgets import Budget, Meter
from merganser.tuning.autopilot.contenders import PLAIN, Contender, propose
from merganser.tuning.autopilot.deciding import decide
from merganser.tuning.autopilot.exams import Exam

ZOOS = {"text": "auto", "images": "auto_images", "language models": "auto_language"}
#: Scales are in eighths of an octave around 1, or around two shares of a plain sum; and how many of each side.
STEPS, REACH = 8, 24
SHARED, OWN, KEPT = 0.55, 0.25, 0.93
#: The width of the kernel that smooths a grid, in steps.
WIDTH = 3.0
#: What experts get right of their own questions, and models of others.
EXPERT, OTHERS = 0.9, 0.25
QUESTIONS = 200


class NoMerges:
    """Stands in for merges: a contender is its own variant."""

    base_name, seed = "base", 0

    def quick(self, contender: Contender) -> Contender:
        return contender

    exact = quick

    def document(self, contender: Contender) -> dict[str, Any]:
        return {"contender": contender}


@dataclass(frozen=True)
class Zoo:
    """The true accuracies of merges, from the results of a measured grid."""

    results: Mapping[str, Any]

    @property
    def tasks(self) -> list[str]:
        return list(self.results["tasks"])

    def step(self, method: str, scale: float) -> int:
        """The place of a scale on the simulated axis."""
        unit = 2 / len(self.tasks) if method == PLAIN else 1.0
        return min(2 * REACH, max(0, REACH + round(STEPS * math.log2(scale / unit))))

    @cached_property
    def curves(self) -> dict[str, np.ndarray]:
        """The true accuracy of every method by step: a local parabola through its row of the grid."""
        rows: dict[str, list[tuple[int, float]]] = {}
        for row in self.results["grid"]:
            rows.setdefault(row["method"], []).append((self.step(row["method"], row["scale"]), row["accuracy"]))
        return {method: np.array([_smooth(own, at) for at in range(2 * REACH + 1)]) for method, own in rows.items()}

    @cached_property
    def grid(self) -> list[tuple[str, int]]:
        return list(
            dict.fromkeys((row["method"], self.step(row["method"], row["scale"])) for row in self.results["grid"])
        )

    def truth(self, merge: tuple[str, int]) -> float:
        return float(self.curves[merge[0]][merge[1]])


def _smooth(points: Sequence[tuple[int, float]], at: int) -> float:
    x, y = np.array(points, dtype=float).T
    near = x - min(max(at, x.min()), x.max())
    roots = np.sqrt(np.exp(-((near / WIDTH) ** 2) / 2))
    design = np.stack([np.ones_like(near), near, near**2], 1)
    return float(np.clip(np.linalg.lstsq(design * roots[:, None], y * roots, rcond=None)[0][0], 0.05, 0.97))


class Answers:
    """Whether every merge and model answers every question right, tasks × questions."""

    def __init__(self, zoo: Zoo, draw: np.random.Generator) -> None:
        shape = (len(zoo.tasks), max(zoo.results["validation"].values()))
        difficulty = draw.standard_normal(shape)
        self.merges: dict[tuple[str, int], np.ndarray] = {}
        for method, curve in zoo.curves.items():
            own, now = draw.standard_normal(shape), draw.standard_normal(shape)
            for step, accuracy in enumerate(curve):
                now = KEPT * now + math.sqrt(1 - KEPT**2) * draw.standard_normal(shape)
                latent = math.sqrt(SHARED) * difficulty + math.sqrt(OWN) * own + math.sqrt(1 - SHARED - OWN) * now
                self.merges[method, step] = latent < ndtri(accuracy)
        self.models = {}
        for place, name in enumerate((*zoo.tasks, NoMerges.base_name)):
            shares = np.where(np.arange(shape[0]) == place, EXPERT, OTHERS)[:, None]
            latent = math.sqrt(SHARED) * difficulty + math.sqrt(1 - SHARED) * draw.standard_normal(shape)
            self.models[name] = latent < ndtri(shares)


def simulate(zoo: Zoo, seed: int) -> tuple[float, float]:
    """How far the grid's choice and the autopilot's are below the truly best merge."""
    draw = np.random.default_rng(seed)
    answers, count = Answers(zoo, draw), max(zoo.results["validation"].values())

    def place(contender: Contender) -> tuple[str, int]:
        return contender.name, zoo.step(contender.name, contender.scale)

    def ask(contender: Any, items: Mapping[str, Sequence[int]]) -> dict[str, list[float]]:
        right = answers.merges[place(contender)] if contender.is_merge else answers.models[contender.name]
        return {task: right[zoo.tasks.index(task)][list(own)].astype(float).tolist() for task, own in items.items()}

    exam = Exam({task: draw.permutation(count).tolist() for task in zoo.tasks}, ask, "simulated")
    meter = Meter(Budget(questions=zoo.results["full"] // 10))
    with AnswerJournal(None, exam.name, meter) as journal:
        merges: Any = NoMerges()
        board = Scoreboard(exam, merges, journal, lambda *_: None)
        models = [Contender(name) for name in answers.models]
        decision = decide(board, models, propose(zoo.tasks, (), list(zoo.curves)), (), QUESTIONS)
    assert decision.best_recipe is not None
    found = place(decision.best_recipe["contender"])
    best = max(map(zoo.truth, zoo.grid))
    chosen = max(zoo.grid, key=lambda merge: answers.merges[merge].mean())
    return best - zoo.truth(chosen), best - zoo.truth(found)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100, help="simulated exams of each zoo")
    parser.add_argument("--zoos", nargs="+", choices=ZOOS, default=list(ZOOS), metavar="NAME", help=", ".join(ZOOS))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    runs = 2 if options.quick else options.runs
    some = len(options.zoos) < len(ZOOS)
    results: dict[str, Any] = json.loads(options.json.read_text())["results"] if some and options.json else {}
    for name in options.zoos:
        zoo = Zoo(stored(ZOOS[name])["results"])
        grid, autopilot = zip(*(simulate(zoo, seed) for seed in range(runs)), strict=True)
        results[name] = {"error": zoo.results["best"]["error"], "grid": grid, "autopilot": autopilot}
        print(f"{name}: grid {np.mean(grid):.4f}, autopilot {np.mean(autopilot):.4f} below the best", flush=True)
        record(options.json, results, [0], added=some)


if __name__ == "__main__":
    main()
