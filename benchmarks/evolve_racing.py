"""What a winner costs: racing, few items and full evaluation, on simulated answers whose truth is known.

    python -m benchmarks.evolve_racing [--seeds 12] [--quick] [--json FILE]

The world is simulated: three experts with a skill each, whose merges mix abilities and interfere; an item is answered
rightly when ability and luck, the same luck for all candidates, exceed its difficulty. The true score of a winner is
its expected share of right answers. Costs are counted by the study (questions of the search, of calibration and of
re-ranking; merges) and turned into processor seconds by what one question and one merge took of SmolLM2-135M on
CommonsenseQA, one thread: 0.567 s with every option asked as a whole sequence, as before prompts were shared, 0.189 s
now, and 0.49 s for a merge of three. Goal: within one standard error of full evaluation's winner at a fifth of its
seconds, and a third of those of gmp-IRT, both as they were before.

Coverage: how often a race stops a candidate that is truly better than the incumbent by more than the margin.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import expit

from benchmarks.evolve_winners import lost
from benchmarks.records import record
from merganser.evolve import Calibration, Design, Objective, Search, SearchParameter, Study, StudyTask
from merganser.evolve.racing import MARGIN, Race, rungs
from merganser.evolve.summary import summarize

EXPERTS = ("a", "b", "c")
ITEMS = 300
#: Processor seconds of a question before and now, and of a merge; see above.
BEFORE, NOW, MERGE = 0.567, 0.189, 0.49


@dataclass(frozen=True)
class World:
    """Answers of merges, by weights; of experts, by name."""

    seed: int

    def logits(self, candidate: Any) -> np.ndarray:
        rng = np.random.default_rng(self.seed)
        discrimination, difficulty = rng.lognormal(-0.3, 0.4, (ITEMS, 3)), rng.normal(1.0, 1.0, ITEMS)
        skills = 2.5 * np.eye(3) - 0.6
        if isinstance(candidate, str):
            ability = skills[EXPERTS.index(candidate)]
        else:
            weights = np.array([candidate[f"weight.{name}"] for name in EXPERTS])
            ability = weights @ skills - 0.35 * weights @ weights
        found: np.ndarray = ability @ discrimination.T - difficulty
        return found

    def truth(self, candidate: Any) -> float:
        return float(expit(self.logits(candidate)).mean())

    def __call__(self, candidate: Any, items: Mapping[str, Sequence[int]]) -> dict[str, Any]:
        luck = np.random.default_rng([self.seed, 1]).logistic(size=ITEMS)
        sure = self.logits(candidate) + luck
        chosen = list(items["quiz"])
        return {"quiz": (sure[chosen] > 0).astype(float), "quiz.soft": expit(2 * sure[chosen])}

    def others(self, count: int = 12) -> np.ndarray:
        """Answers of models that are neither merged nor merges."""
        rng = np.random.default_rng([self.seed, 2])
        points = rng.uniform(0, 1.5, (count, 3)) * (rng.random((count, 3)) < 0.5)
        names = [f"weight.{name}" for name in EXPERTS]
        rows = [self(dict(zip(names, p, strict=True)), {"quiz": range(ITEMS)}) for p in points]
        return np.array([row["quiz"] for row in rows])


@dataclass(frozen=True)
class Fitness:
    """How candidates are judged, and what a question costs."""

    seconds: float
    subset: int | None = None
    estimator: str = "naive"
    race: int = 0
    measure: str = "quiz"


FITNESS = {
    "full, before": Fitness(BEFORE),
    "gmp-irt 20, before": Fitness(BEFORE, 20, "gmp-irt"),
    "gmp-irt 50, before": Fitness(BEFORE, 50, "gmp-irt"),
    "full": Fitness(NOW),
    "gmp-irt 20": Fitness(NOW, 20, "gmp-irt"),
    "race": Fitness(NOW, race=5),
    "race of 60": Fitness(NOW, 60, race=5),
    "race of 60, soft": Fitness(NOW, 60, race=5, measure="quiz.soft"),
    "race of 30, soft": Fitness(NOW, 30, race=5, measure="quiz.soft"),
}


def search(fitness: Fitness, seed: int, population: int, generations: int) -> dict[str, float]:
    """One study: the true score of its winner, and its processor seconds."""
    world = World(seed)
    informed = fitness.estimator != "naive"
    design = Design(
        space={"weight": SearchParameter(0.0, 1.5, per="model")},
        tasks={
            "quiz": StudyTask(ITEMS, fitness.subset, estimator=fitness.estimator, dimensions=3 if informed else None)
        },
        objectives=(Objective.of(fitness.measure),),
        models=dict.fromkeys(EXPERTS, ""),
        search=Search(
            population=population,
            generations=generations,
            seed=seed,
            split_seed=seed,
            rerank=3 if fitness.subset else 0,
            race=fitness.race,
        ),
    )
    with tempfile.TemporaryDirectory() as folder, Study.open(Path(folder, "study.sqlite")) as study:
        known = {"quiz": Calibration(answers=world.others())} if informed else None
        winner = study.run(design, world, calibration=known)
        assert winner is not None
        cost = summarize(study).cost
        merges = cost.models + sum(t.state == "done" for t in study.store.trials("full"))
    questions = cost.asked + cost.calibration + cost.again
    return {
        "score": world.truth(winner.values),
        "questions": questions,
        "seconds": fitness.seconds * questions + MERGE * merges,
    }


def coverage(draws: int, seed: int = 0) -> dict[str, float]:
    """Share of races that stop a candidate whose true gain is 0, the margin, or twice the margin."""
    rng = np.random.default_rng(seed)
    found = {}
    for gain in (0.0, MARGIN, 2 * MARGIN):
        stopped = 0
        for _ in range(draws):
            p, luck = rng.beta(1.2, 1.2, ITEMS), rng.random(ITEMS)
            incumbent, candidate = luck < p, np.where(rng.random(ITEMS) < 0.7, luck, rng.random(ITEMS)) < p + gain
            race = Race(5, ({"quiz": incumbent.astype(float)},), (Objective.of("quiz"),))
            looks = rungs(5, ITEMS)[:-1]
            stopped += any(race.lost({"quiz": candidate[:n].astype(float)}) is not None for n in looks)
        found[f"{gain:.2f}"] = stopped / draws
    return found


def measure(seeds: Sequence[int], population: int, generations: int, draws: int) -> dict[str, Any]:
    runs = {name: [search(each, seed, population, generations) for seed in seeds] for name, each in FITNESS.items()}
    reference = [run["score"] for run in runs["full, before"]]
    rows = {}
    for name, found in runs.items():
        means = {key: float(np.mean([run[key] for run in found])) for key in found[0]}
        rows[name] = means | lost(reference, [run["score"] for run in found])
    for row in rows.values():
        row["fewer_than_full"] = rows["full, before"]["seconds"] / row["seconds"]
        row["fewer_than_gmp_irt"] = rows["gmp-irt 20, before"]["seconds"] / row["seconds"]
    error = float(np.mean([(score * (1 - score) / ITEMS) ** 0.5 for score in reference]))
    return {"fitness": rows, "standard_error": error, "stopped_by_gain": coverage(draws)}


def show(found: Mapping[str, Any]) -> None:
    print(f"{'fitness':<20}{'true score':>11}{'loss':>9}{'±':>8}{'questions':>11}{'seconds':>9}{'full/':>8}{'gmp/':>8}")
    for name, row in found["fitness"].items():
        print(
            f"{name:<20}{row['score']:>11.4f}{row['loss']:>9.4f}{row['loss_error']:>8.4f}{row['questions']:>11.0f}"
            f"{row['seconds']:>9.0f}{row['fewer_than_full']:>7.1f}×{row['fewer_than_gmp_irt']:>7.1f}×"
        )
    print(f"one standard error of a score of {ITEMS} items: {found['standard_error']:.4f}")
    print(
        "stopped, by true gain: " + ", ".join(f"{gain} {share:.3f}" for gain, share in found["stopped_by_gain"].items())
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=12)
    parser.add_argument("--population", type=int, default=12)
    parser.add_argument("--generations", type=int, default=6)
    parser.add_argument("--quick", action="store_true", help="2 seeds, small searches")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    if options.quick:
        options.seeds, options.population, options.generations = 2, 6, 2
    seeds = range(options.seeds)
    found = measure(seeds, options.population, options.generations, 20 if options.quick else 300)
    show(found)
    record(options.json, found, seeds)


if __name__ == "__main__":
    main()
