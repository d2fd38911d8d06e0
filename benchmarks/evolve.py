"""Evolutionary merging with few evaluations, on real models: how good its estimates and winners are, what it costs.

    python -m benchmarks.evolve [--models sentences | questions] --cache ZOO [--quick] [--json FILE]

Three experts are merged by task arithmetic; the score is the share of items answered rightly. Every merge of a grid of
weights answers all items once (kept in the cache). The IRT is fitted to the answers of models that are no merges.

- `sentences`: MiniLM text experts and test sentences of their tasks, each answered through its own task's head; the
  IRT knows the base, all experts of the zoo, and the same after one epoch;
- `questions`: LoRA fine-tunes of SmolLM2-135M and multiple-choice questions scored by log-likelihood; the IRT knows the
  base, the fine-tunes, and the same weaker and stronger.

Then

- estimates: mean absolute error and rank correlation of every estimator with every extractor at n items against the
  full evaluation of the merges, and the error of the ability fitted on n items against that fitted on all;
- winners: the score on all items, and on items put aside, of what a genetic algorithm finds with full evaluation, the
  mean over n items, or gmp-IRT on n items (random, or chosen by IRT clustering) as fitness. Goal: within one bootstrap
  standard error of full evaluation's winner at a twentieth of the questions;
- overhead: processor time of search, estimation and store per trial, and of merging, over that of the questions. Goal:
  at most 5 %. The limit of merging is a copy of the model's weights in memory.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.evolve_answers import Exam, Pool, Setting, collect
from benchmarks.evolve_estimates import measure_estimates
from benchmarks.evolve_questions import load_questions
from benchmarks.evolve_sentences import load_sentences
from benchmarks.machine import describe
from benchmarks.records import record
from benchmarks.zoo.cards import add_locations
from merganser.evolve import Calibration, Design, Objective, Study, Task
from merganser.evolve.fitness import LiveMerge
from merganser.evolve.progress import Event
from merganser.evolve.space import key
from merganser.evolve.summary import summarize

NAME = "items"
RESAMPLES = 1000
#: Population and generations of the thesis: more trials than the grids here have points, so that what is left between
#: the winners of different fitness is the fitness alone.
LARGER = (25, 7)


@dataclass(frozen=True)
class Kind:
    """Models of one kind: how their items are had, and what is measured unless told otherwise."""

    load: Callable[[Setting, Path, Path], Exam]
    experts: tuple[str, ...]
    items: int
    weights: tuple[float, ...]


KINDS = {
    "sentences": Kind(load_sentences, ("trec", "mpqa", "clinc150"), 200, (0.0, 0.5, 1.0, 1.5)),
    "questions": Kind(load_questions, ("arithmetic", "letters", "reviews"), 24, (0.0, 0.6, 1.2)),
}


# -- winners


@dataclass(frozen=True)
class Replay:
    """The evaluator of a study that reads its answers."""

    rows: Mapping[str, np.ndarray]

    def __call__(self, candidate: Any, items: Mapping[str, Sequence[int]]) -> dict[str, Any]:
        row = self.rows[candidate if isinstance(candidate, str) else key(candidate)]
        return {name: row[list(chosen)] for name, chosen in items.items()}


def task(setting: Setting, pool: Pool, fitness: str, size: int | None) -> Task:
    count = len(pool.strata)
    if fitness.startswith("gmp-irt"):
        extractor = "irt" if fitness == "gmp-irt, irt" else "random"
        return Task(NAME, count, size, extractor, "gmp-irt", "adaptive")
    return Task(NAME, count, size)


def measure_winners(
    setting: Setting, pool: Pool, sizes: Sequence[int], seeds: Sequence[int], population: int, generations: int
) -> dict[str, Any]:
    """By fitness and n: the winner's score on all items and on the test items, what it cost; means over seeds."""
    rows = {key(values): row for values, row in zip(setting.grid, pool.merges, strict=True)}
    replay = Replay(rows | dict(zip(setting.experts, pool.endpoints(setting), strict=True)))
    calibration = {NAME: Calibration(answers=pool.calibration(setting))}
    kinds: list[tuple[str, int | None]] = [("full", None)]
    kinds += [(fitness, size) for size in sizes for fitness in ("mean", "gmp-irt", "gmp-irt, irt")]
    found: dict[str, Any] = {}
    for fitness, size in kinds:
        runs = []
        for seed in seeds:
            design = Design(
                setting.space,
                (task(setting, pool, fitness, size),),
                (Objective.of(NAME),),
                setting.experts,
                population=population,
                generations=generations,
                seed=seed,
            )
            with tempfile.TemporaryDirectory() as folder:
                study = Study.open(Path(folder, "study.sqlite"))
                winner = study.run(design, replay, calibration=calibration if size and fitness != "mean" else None)
                assert winner is not None
                summary = summarize(study)
                study.close()
            row = rows[winner.label]
            runs.append(
                {
                    "score": float(row.mean()),
                    "bootstrap_error": bootstrap_error(row, seed),
                    "test": summary.winners[0].test[NAME],
                    "estimated": winner.objectives[NAME],
                    "asked": summary.cost.asked,
                    "calibration": summary.cost.calibration,
                    "full": summary.cost.full,
                    "saved_per_candidate": summary.cost.full / summary.cost.asked,
                    "saved": summary.cost.saved,
                }
            )
        label = fitness if size is None else f"{fitness} {size}"
        found[label] = {name: float(np.mean([run[name] for run in runs])) for name in runs[0]} | {"runs": runs}
    full = found["full"]
    for each in found.values():
        each["loss"] = full["score"] - each["score"]
        each["within_one_error"] = bool(each["loss"] <= full["bootstrap_error"])
    scores = pool.merges.mean(1)
    return {
        "population": population,
        "generations": generations,
        "seeds": list(seeds),
        "grid": {"size": len(scores), "best": float(scores.max()), "mean": float(scores.mean())},
        "endpoints": dict(zip(setting.experts, pool.endpoints(setting).mean(1).tolist(), strict=True)),
        "base": float(pool.others[pool.models.index("base")].mean()),
        "fitness": found,
    }


def bootstrap_error(row: np.ndarray, seed: int) -> float:
    drawn = np.random.default_rng(seed).integers(0, len(row), (RESAMPLES, len(row)))
    return float(row[drawn].mean(1).std())


# -- overhead


@dataclass
class Timed:
    """A live evaluator that keeps the processor time of merging and of asking; of endpoints it knows the answers."""

    live: LiveMerge
    exam: Exam
    known: Replay
    merging: float = 0.0
    asking: float = 0.0
    searching: list[tuple[float, float, float]] = field(default_factory=list)

    def __call__(self, candidate: Any, items: Mapping[str, Sequence[int]]) -> dict[str, Any]:
        if isinstance(candidate, str):
            return self.known(candidate, items)
        began = time.process_time()
        model = self.live.load(candidate)
        merged = time.process_time()
        with torch.inference_mode():
            answers = self.exam.asked(model, items[NAME])
        self.merging += merged - began
        self.asking += time.process_time() - merged
        return {NAME: answers}

    def listen(self, event: Event) -> None:
        """What was spent up to each event of the search, in all, on merging and on asking."""
        if event.phase == "search":
            self.searching.append((time.process_time(), self.merging, self.asking))


def measure_overhead(
    setting: Setting, pool: Pool, exam: Exam, size: int, population: int, generations: int
) -> dict[str, Any]:
    """CPU seconds per trial of a live study at n = `size` with gmp-IRT, and of a copy of the model's weights."""
    timed = Timed(exam.live(), exam, Replay(dict(zip(setting.experts, pool.endpoints(setting), strict=True))))
    timed.live.load(setting.grid[0])
    design = Design(
        setting.space,
        (task(setting, pool, "gmp-irt", size),),
        (Objective.of(NAME),),
        setting.experts,
        population=population,
        generations=generations,
    )
    with tempfile.TemporaryDirectory() as folder:
        study = Study.open(Path(folder, "study.sqlite"))
        calibration = {NAME: Calibration(answers=pool.calibration(setting))}
        study.run(design, timed, calibration=calibration, listen=timed.listen)
        evaluated = sum(t.state == "done" and t.cached_from is None for t in study.trials())
        trials = len(study.trials())
        study.close()
    total, merging, asking = np.subtract(timed.searching[-1], timed.searching[0]).tolist()
    machinery, merging, asking = (total - merging - asking) / trials, merging / evaluated, asking / evaluated
    began = time.process_time()
    with torch.inference_mode():
        exam.answers(timed.live.module)
    full = time.process_time() - began
    copying = copy_seconds(timed.live.module)
    return {
        "n": size,
        "trials": trials,
        "evaluated": evaluated,
        "machinery": machinery,
        "merging": merging,
        "copying": copying,
        "merging_over_copying": merging / copying,
        "merging_over_asking": merging / asking,
        "merging_over_asking_full": merging / full,
        "asking": asking,
        "asking_full": full,
        "machinery_over_asking": machinery / asking,
        "machinery_and_merging_over_asking": (machinery + merging) / asking,
        "machinery_over_asking_full": machinery / full,
        "machinery_and_merging_over_asking_full": (machinery + merging) / full,
    }


def copy_seconds(module: nn.Module, repeats: int = 5) -> float:
    """Processor time of one copy of all parameters into memory that is there already."""
    sources = [parameter.detach() for parameter in module.parameters()]
    targets = [torch.empty_like(source).copy_(source) for source in sources]
    began = time.process_time()
    for _ in range(repeats):
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source)
    return (time.process_time() - began) / repeats


# -- the program


def show(report: Mapping[str, Any]) -> None:
    estimates, overhead = report["estimates"], report["overhead"]
    print(f"{describe()}\n{report['items']} items of {', '.join(report['experts'])}")
    print(
        f"\nmean absolute error × 100 (Spearman) over {estimates['merges']} merges and {estimates['draws']} subsets; "
        f"of the endpoints' mean, without any item: {100 * estimates['mae_of_the_endpoints_mean']:.2f}"
    )
    for size, extractors in estimates["mae"].items():
        names = list(next(iter(extractors.values())))
        print(f"n = {size:<12}" + "".join(f"{name:>18}" for name in names))
        for extractor, row in extractors.items():
            ranks = estimates["spearman"][size][extractor]
            print(f"  {extractor:<14}" + "".join(f"{100 * row[name]:>10.2f} ({ranks[name]:>5.2f})" for name in names))
    print(
        f"\nIRT of {estimates['irt']['models']} models that are no merges, dimensions: {estimates['irt']['dimensions']}"
    )
    print("ability against that fitted on all items (random items): Euclidean, 1 − cosine")
    for size, row in estimates["ability"].items():
        line = "; ".join(f"{name} {v['euclidean']:.2f}, {v['cosine']:.3f}" for name, v in row.items())
        print(f"  n = {size}: {line}")
    show_winners(report["winners"])
    show_winners(report["larger"])
    times = {name: 1000 * overhead[name] for name in ("machinery", "merging", "copying", "asking", "asking_full")}
    print("\nCPU ms per trial: " + ", ".join(f"{name} {value:.1f}" for name, value in times.items()))
    print(
        f"machinery over the questions: {overhead['machinery_over_asking']:.3f} at n = {overhead['n']}, "
        f"{overhead['machinery_over_asking_full']:.3f} at full evaluation; with merging "
        f"{overhead['machinery_and_merging_over_asking']:.3f} and "
        f"{overhead['machinery_and_merging_over_asking_full']:.3f}"
    )


def show_winners(winners: Mapping[str, Any]) -> None:
    print(
        f"\nwinners of {winners['population']} × {winners['generations']} over {len(winners['seeds'])} seeds (best of "
        f"{winners['grid']['size']} merges {winners['grid']['best']:.4f}, mean {winners['grid']['mean']:.4f}, base "
        f"{winners['base']:.4f}, best endpoint {max(winners['endpoints'].values()):.4f})"
    )
    print(
        f"{'fitness':<17}{'score':>9}{'test':>9}{'loss':>9}{'error':>9}{'within':>8}{'fewer':>9}{'with endpoints':>16}"
    )
    for name, row in winners["fitness"].items():
        print(
            f"{name:<17}{row['score']:>9.4f}{row['test']:>9.4f}{row['loss']:>9.4f}{row['bootstrap_error']:>9.4f}"
            f"{'yes' if row['within_one_error'] else 'no':>8}{row['saved_per_candidate']:>8.1f}×{row['saved']:>15.1f}×"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", choices=KINDS, default="sentences")
    parser.add_argument("--experts", nargs="+", help="tasks or skills of the zoo; three by default")
    parser.add_argument("--items", type=int, help="of each expert's task; 200 sentences or 24 questions by default")
    parser.add_argument("--weights", type=float, nargs="+", help="of each expert; all combinations make the grid")
    parser.add_argument("--sizes", type=int, nargs="+", default=[10, 20, 50])
    parser.add_argument("--draws", type=int, default=5, help="subsets of each size")
    parser.add_argument("--merges", type=int, default=60, help="merges that estimates are judged on")
    parser.add_argument("--population", type=int, default=8)
    parser.add_argument("--generations", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=10, help="searches per fitness")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="8 merges, few items, 2 seeds, 1 draw")
    parser.add_argument("--json", type=Path, metavar="FILE")
    add_locations(parser)
    options = parser.parse_args(arguments)
    if options.quick:
        options.weights, options.items = [0.3, 0.7], {"sentences": 60, "questions": 8}[options.models]
        options.population, options.generations, options.seeds, options.draws = 5, 2, 2, 1
        options.sizes = [n for n in options.sizes if n < options.items]
    torch.manual_seed(options.seed)
    kind = KINDS[options.models]
    setting = Setting(
        tuple(options.experts or kind.experts), options.items or kind.items, tuple(options.weights or kind.weights)
    )
    exam = kind.load(setting, options.cache, options.data)
    pool = collect(setting, exam, options.cache)
    seeds = range(options.seed, options.seed + options.seeds)
    report = {
        "threads": torch.get_num_threads(),
        "models": options.models,
        "experts": setting.experts,
        "weights": setting.weights,
        "items": len(pool.strata),
        "estimates": measure_estimates(setting, pool, options.sizes, options.draws, options.merges, options.seed),
        "winners": measure_winners(setting, pool, options.sizes, seeds, options.population, options.generations),
        "larger": measure_winners(setting, pool, options.sizes, seeds, *LARGER),
        "overhead": measure_overhead(setting, pool, exam, options.sizes[len(options.sizes) // 2], 5, 2),
    }
    show(report)
    record(options.json, report, seeds)


if __name__ == "__main__":
    main()
