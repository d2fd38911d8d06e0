"""Evolutionary merging with few evaluations, on real models: how good its estimates and winners are, what it costs.

    python -m benchmarks.evolve [--models sentences | questions] --cache ZOO [--quick] [--replay] [--json FILE]

Three experts are merged by task arithmetic; the score is the share of items answered rightly. Every merge of a grid of
weights answers all items once (kept in the cache). The IRT is fitted to the answers of models that are no merges.

- `sentences`: MiniLM text experts and test sentences of their tasks, each answered through its own task's head; the
  IRT knows the base, all experts of the zoo, and the same after one epoch;
- `questions`: LoRA fine-tunes of SmolLM2-135M-Instruct, dequantised from 4-bit, and multiple-choice questions scored
  by log-likelihood; the IRT knows the base, the fine-tunes, and the same at half their strength. The cards of the zoo
  say what fine-tuning changed (`fine_tuning`).

Then

- estimates: mean absolute error and rank correlation of every estimator with every extractor at n items against the
  full evaluation of the merges, and the error of the ability fitted on n items against that fitted on all;
- winners: the score on items put aside of what a genetic algorithm finds with full evaluation, the mean over n items,
  or gmp-IRT on n items (random, or chosen by IRT clustering) as fitness; also with as many trials as in the thesis.
  Goal: within one bootstrap standard error of full evaluation's winner at a twentieth of the questions;
- transfer: of the items that some endpoint answers rightly, how many winners, plain merges and endpoints do not;
- overhead: processor time of search, estimation and store per trial, and of merging, over that of the questions. Goal:
  at most 5 %. The limit of merging is a copy of the model's weights in memory.

All but the overhead comes from the kept answers; `--replay` measures that alone anew, and leaves the overhead as FILE
has it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.evolve_answers import Exam, Setting, collect, measure_single
from benchmarks.evolve_estimates import measure_estimates
from benchmarks.evolve_overhead import measure_overhead
from benchmarks.evolve_questions import fine_tuning, load_questions
from benchmarks.evolve_sentences import load_sentences
from benchmarks.evolve_transfer import measure_transfer
from benchmarks.evolve_winners import fitted_once, measure_winners
from benchmarks.machine import describe
from benchmarks.records import record
from benchmarks.zoo.cards import add_locations

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
    "questions": Kind(load_questions, ("questions", "sources", "intents"), 22, (0.0, 0.4, 0.8)),
}


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
        line = "; ".join(f"{name} {v['euclidean']:.2f}, {v['cosine']:.3f}" for name, v in row["estimators"].items())
        print(f"  n = {size}: {line}")
    show_winners(report["winners"])
    show_winners(report["larger"])
    show_transfer(report["transfer"])
    times = {name: 1000 * overhead[name] for name in ("machinery", "merging", "copying", "asking", "asking_full")}
    print("\nCPU ms per trial: " + ", ".join(f"{name} {value:.1f}" for name, value in times.items()))
    print(
        f"machinery over the questions: {overhead['machinery_over_asking']:.3f} at n = {overhead['n']}, "
        f"{overhead['machinery_over_asking_full']:.3f} at full evaluation; with merging "
        f"{overhead['machinery_and_merging_over_asking']:.3f} and "
        f"{overhead['machinery_and_merging_over_asking_full']:.3f}"
    )


def show_winners(winners: Mapping[str, Any]) -> None:
    unseen = winners["unseen"]
    best = max((name for name in winners["endpoints"]), key=lambda name: winners["endpoints"][name])
    alone = unseen["models"][best]["runs"]
    print(
        f"\nwinners of {winners['population']} × {winners['generations']} over {len(winners['seeds'])} seeds, "
        f"{unseen['items']} unseen items each (best endpoint on them: {sum(alone) / len(alone):.4f})"
    )
    print(f"{'fitness':<17}{'unseen':>9}{'loss':>9}{'±':>9}{'error':>9}{'within':>8}{'fewer':>9}{'calibrated':>12}")
    for name, row in winners["fitness"].items():
        print(
            f"{name:<17}{row['test']:>9.4f}{row['loss']:>9.4f}{row['loss_error']:>9.4f}{row['bootstrap_error']:>9.4f}"
            f"{'yes' if row['within_one_error'] else 'no':>8}{row['saved_per_candidate']:>8.1f}×{row['saved']:>11.1f}×"
        )


def show_transfer(transfer: Mapping[str, Any]) -> None:
    print(f"\nnegative transfer of the {transfer['known']} items that some endpoint answers rightly")
    rows = {f"winner of {name}": row for name, row in transfer["winners"]["larger"].items()}
    rows |= {f"all weights {weight}": row for weight, row in transfer["equal_weights"].items()}
    rows |= {"merges of the grid": transfer["grid"], **transfer["endpoints"]}
    for name, row in rows.items():
        parts = {**row["tasks"], "all": row["all"]}
        print(f"{name:<26}" + "  ".join(f"{k} {v['rate']:.3f} ± {v['error']:.3f}" for k, v in parts.items()))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", choices=KINDS, default="sentences")
    parser.add_argument("--experts", nargs="+", help="tasks or skills of the zoo; three by default")
    parser.add_argument("--items", type=int, help="of each expert's task; 200 sentences or 22 questions by default")
    parser.add_argument("--weights", type=float, nargs="+", help="of each expert; all combinations make the grid")
    parser.add_argument("--sizes", type=int, nargs="+", default=[10, 20, 50])
    parser.add_argument("--draws", type=int, default=5, help="subsets of each size")
    parser.add_argument("--merges", type=int, default=60, help="merges that estimates are judged on")
    parser.add_argument("--population", type=int, default=8)
    parser.add_argument("--generations", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=10, help="searches per fitness")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="8 merges, few items, 2 seeds, 1 draw")
    parser.add_argument("--replay", action="store_true", help="no model is run; the overhead stays as --json has it")
    parser.add_argument("--json", type=Path, metavar="FILE")
    add_locations(parser)
    options = parser.parse_args(arguments)
    if options.quick:
        options.weights, options.items = [0.3, 0.7], {"sentences": 60, "questions": 8}[options.models]
        options.population, options.generations, options.seeds, options.draws = 5, 2, 2, 1
        options.sizes = [n for n in options.sizes if n < options.items]
    if options.replay and not (options.json and options.json.exists()):
        parser.error("--replay needs the --json FILE of an earlier run")
    torch.manual_seed(options.seed)
    kind = KINDS[options.models]
    setting = Setting(
        tuple(options.experts or kind.experts), options.items or kind.items, tuple(options.weights or kind.weights)
    )
    exam = kind.load(setting, options.cache, options.data)
    pool = collect(setting, exam, options.cache)
    seeds = range(options.seed, options.seed + options.seeds)
    with fitted_once():
        searches = [
            measure_winners(setting, pool, options.sizes, seeds, *search)
            for search in ((options.population, options.generations), LARGER)
        ]
    report = {
        "threads": torch.get_num_threads(),
        "models": options.models,
        "experts": setting.experts,
        "weights": setting.weights,
        "items": len(pool.strata),
        "estimates": measure_estimates(setting, pool, options.sizes, options.draws, options.merges, options.seed),
        "single": measure_single(setting, pool),
        **({"fine_tuning": fine_tuning(setting, options.cache, options.data)} if options.models == "questions" else {}),
        "winners": searches[0],
        "larger": searches[1],
        "transfer": measure_transfer(setting, pool, dict(zip(("winners", "larger"), searches, strict=True))),
        "overhead": json.loads(options.json.read_text())["results"]["overhead"]
        if options.replay
        else measure_overhead(setting, pool, exam, options.sizes[len(options.sizes) // 2], 5, 2),
    }
    show(report)
    record(options.json, report, seeds, added=options.replay)


if __name__ == "__main__":
    main()
