"""Merging text experts of MiniLM into one encoder: every static method, for 4, 6 and 8 tasks.

    python -m benchmarks.multi_task [--cache ZOO] [--tasks 4 6 8] [--test N] [--validation N] [--quick] [--json FILE]

Half an hour of one core (`--quick`: two minutes, 4 tasks, few sentences). The scaling coefficient α of a method is the
one of a grid with the best mean accuracy on labelled validation sentences, as in the thesis (a grid grows where its end
is the best); scores are of test sentences, each answered through its task's own head. Normalised accuracy is the mean
over tasks of accuracy over that of the fine-tuned expert. Numbers of tasks that are not measured now stay in FILE as
they are.

Stored in `results`:

- `sentences`: test and validation sentences of each task (test files may be shorter), `subsets`: tasks by their number;
- `settings`: parameters of each method beside α;
- `rows`: one of every number of tasks and method, with `tasks`, `method`, `alpha` (null where there is none), `alphas`
  (the grid it was chosen from), `accuracy`, `normalised`, `per_task`; methods that draw have `seeds` and `spread`, the
  standard deviation of the normalised accuracy over seeds, their scores being means;
- `alpha_sweep`: mean validation accuracy of `method` at each `alpha`, `tasks` the largest number of tasks;
- `interference`: for every number of tasks, total `sti` (Σ over matrices of ‖(UᵀU − I) Σ (VᵀV − I)‖₁ of the rank n/T
  factors, orthogonalised in TSV-M) beside `accuracy` and `normalised` of methods for which it is defined;
- `layers`: every matrix for the largest number of tasks: `block`, `rank`, `sti` before and `sti_after` TSV-Merge,
  `normalised_sti` (0 orthogonal, 1 identical) and its `chance` level, relative Procrustes errors of the truncated
  (`procrustes_left`, `_right`) and of whole (`procrustes_full`, the short side) singular vectors, `energy` kept.
  Relative means ‖U − U⊥‖ / ‖U‖: the thesis' theorem compares them times √(T·rank) and √(T·n).
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.records import record
from benchmarks.text_adamerging import LEARNING_RATE, STEPS, adamerged
from benchmarks.text_experts import SUBSETS, State, TextExperts, differences, load_experts, summary
from benchmarks.text_interference import layers
from benchmarks.zoo.cards import add_locations
from merganser.tuning.parts import tsv_parts

#: For sums of task vectors, and for means and spectral merges, whose natural coefficient is about 1.
SUMS = (0.1, 0.2, 0.3, 0.4, 0.6)
MEANS = (0.4, 0.7, 1.0, 1.4, 2.0)
#: A grid whose end is the best grows by this factor, and so often at most.
GROWTH, GROWN = 1.4, 3
SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Row:
    """A line of the table: a method of `mg.merge`, its parameters, the grid of its α, seeds where it draws."""

    name: str
    method: str
    alphas: tuple[float, ...]
    parameters: Mapping[str, Any]
    seeds: tuple[int, ...] = ()


ROWS = (
    Row("task arithmetic", "task_arithmetic", SUMS, {}),
    Row("TIES", "ties", MEANS, {"density": 0.2}),
    Row("DARE", "dare_linear", SUMS, {"density": 0.2}, SEEDS),
    Row("DARE-TIES", "dare_ties", SUMS, {"density": 0.2}, SEEDS),
    Row("Breadcrumbs", "breadcrumbs", SUMS, {"density": 0.85, "gamma": 0.01}),
    Row("Consensus TA", "consensus_ta", SUMS, {"threshold": 0.4, "agree": 2}),
    Row("Iso-C", "iso_c", MEANS, {}),
    Row("Iso-CTS", "iso_cts", MEANS, {}),
    Row("TSV-M", "tsv", MEANS, {}),
    Row("TSV-M, α = 1", "tsv", (1.0,), {}),
    Row("TSV-M without orthogonalisation", "tsv", SUMS, {"orthogonalize": "none"}),
    Row("TSV-M without low rank", "tsv", MEANS, {"low_rank": False}),
)
#: Rows that multiply concatenated factors, and whether these are orthogonal across tasks then. Task arithmetic is the
#: fourth cell of the ablation, neither truncated nor orthogonal: its STI is that of its leading components.
FACTORED = {"task arithmetic": "sti", "TSV-M without orthogonalisation": "sti", "TSV-M": "sti_after"}


@dataclass(frozen=True)
class Table:
    """The experts with the accuracies of each on its own task, and the tasks that are merged now."""

    experts: TextExperts
    reference: Mapping[str, float]
    names: tuple[str, ...]

    def scored(self, row: str, weights: State, alpha: float | None = None, **more: Any) -> dict[str, Any]:
        found = summary(self.experts.scores(weights, self.names), self.reference)
        return self.entry(row, alpha, found, **more)

    def entry(self, row: str, alpha: float | None, found: Mapping[str, Any], **more: Any) -> dict[str, Any]:
        entry = {"tasks": len(self.names), "method": row, "alpha": alpha, **more, **found}
        print(
            f"{len(self.names)} tasks, {row:<34} α {'-' if alpha is None else alpha!s:<5}"
            f"accuracy {entry['accuracy']:.4f}  normalised {entry['normalised']:.4f}",
            flush=True,
        )
        return entry

    def sweep(self, vector: State, alphas: Sequence[float]) -> dict[float, float]:
        """Mean validation accuracy by α, beyond the ends of the grid as long as they are the best."""
        found = {alpha: self.validated(vector, alpha) for alpha in alphas}
        for _ in range(GROWN):
            factor = {min(found): 1 / GROWTH, max(found): GROWTH}.get(best(found))
            if factor is None:
                break
            alpha = float(f"{best(found) * factor:.2g}")
            found[alpha] = self.validated(vector, alpha)
        return found

    def validated(self, vector: State, alpha: float) -> float:
        scores = self.experts.scores(self.experts.weights(vector, alpha), self.names, "validation")
        return sum(scores.values()) / len(scores)

    def measure(self, row: Row) -> tuple[dict[str, Any], dict[float, float]]:
        """The row, and the sweep its α comes from (empty if there was no choice). All seeds share the first one's α."""
        seeds = row.seeds or (0,)
        vectors = (self.experts.task_vector(row.method, self.names, seed=s, **row.parameters) for s in seeds)
        first = next(vectors)
        sweep = self.sweep(first, row.alphas) if len(row.alphas) > 1 else {}
        alpha = best(sweep) if sweep else row.alphas[0]
        runs = [self._run(first, alpha), *(self._run(vector, alpha) for vector in vectors)]
        drawn: dict[str, Any] = {"seeds": list(seeds)} if row.seeds else {}
        if len(runs) > 1:
            drawn["spread"] = statistics.stdev(run["normalised"] for run in runs)
        return self.entry(row.name, alpha, mean_of(runs), alphas=sorted(sweep) or list(row.alphas), **drawn), sweep

    def _run(self, vector: State, alpha: float) -> dict[str, Any]:
        return summary(self.experts.scores(self.experts.weights(vector, alpha), self.names), self.reference)


def best(sweep: Mapping[float, float]) -> float:
    """The α with the highest score; of equal ones the smallest, which moves the base least."""
    return min(sweep, key=lambda alpha: (-sweep[alpha], alpha))


def mean_of(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Means over runs of every score."""
    tasks = runs[0]["per_task"]
    return {
        **{key: statistics.fmean(run[key] for run in runs) for key in ("accuracy", "normalised")},
        "per_task": {task: statistics.fmean(run["per_task"][task] for run in runs) for task in tasks},
    }


def references(table: Table) -> list[dict[str, Any]]:
    """What needs no choice: the untouched base, the mean of the experts, the experts themselves."""
    experts = table.experts
    own = {name: table.reference[name] for name in table.names}
    average = experts.task_vector("linear", table.names)
    return [
        table.scored("base encoder", experts.base),
        table.scored("weight averaging", experts.weights(average)),
        table.entry("fine-tuned experts", None, summary(own, table.reference)),
    ]


def learned(table: Table, alphas: Mapping[str, float | None], steps: int) -> list[dict[str, Any]]:
    """AdaMerging of the task vectors, and of TSV-Merge's orthogonal parts, both starting from α chosen for the sum."""
    rows = []
    experts, trained = table.experts, table.experts.trained
    vectors = {name: differences(experts.experts[name], trained) for name in table.names}
    kinds = [("AdaMerging", "task arithmetic", vectors), ("AdaMerging on TSV-M", "TSV-M", tsv_parts(vectors))]
    for name, sum_row, parts in kinds:
        start = alphas[sum_row]
        assert start is not None
        result, weights = adamerged(experts, parts, init=start, steps=steps)
        entropy = {"entropy_before": result.entropy_before, "entropy_after": result.entropy_after}
        rows.append(table.scored(name, weights, None, init=start, steps=steps, **entropy))
    return rows


def interferences(rows: Sequence[Mapping[str, Any]], matrices: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Total STI, before or after TSV-Merge, beside the accuracy of each method for which it is defined."""
    by_name = {row["method"]: row for row in rows}
    return [
        {key: by_name[name][key] for key in ("tasks", "method", "accuracy", "normalised")}
        | {"sti": sum(matrix[when] for matrix in matrices)}
        for name, when in FACTORED.items()
    ]


def measured_before(path: Path | None, sizes: Sequence[int], most: int) -> dict[str, list[Any]]:
    """What a record holds of numbers of tasks that are not measured now."""
    found: Mapping[str, Any] = json.loads(path.read_text())["results"] if path and path.exists() else {}
    kept: dict[str, list[Any]] = {
        part: [row for row in found.get(part, ()) if row["tasks"] not in sizes]
        for part in ("rows", "alpha_sweep", "interference")
    }
    return kept | {"layers": [] if most in sizes else found.get("layers", [])}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, nargs="+", choices=sorted(SUBSETS), default=sorted(SUBSETS))
    parser.add_argument("--test", type=int, default=200, help="test sentences of each task")
    parser.add_argument("--validation", type=int, default=32, help="labelled validation sentences of each task")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of AdaMerging")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    add_locations(parser)
    options = parser.parse_args(arguments)
    if options.quick:
        options.test, options.validation, options.steps = 40, 10, 2
    sizes = [4] if options.quick else sorted(options.tasks, reverse=True)
    most = 4 if options.quick else max(SUBSETS)
    everything = load_experts(
        options.cache, options.data, SUBSETS[most], test=options.test, validation=options.validation
    )
    reference = everything.own_scores(everything.experts)
    results: dict[str, Any] = {
        "sentences": {
            name: {"test": min(options.test, len(task.test)), "validation": options.validation}
            for name, task in everything.tasks.items()
        },
        "subsets": {str(size): list(names) for size, names in sorted(SUBSETS.items()) if size <= most},
        "settings": {row.name: {"method": row.method, **row.parameters} for row in ROWS}
        | {"AdaMerging": {"wise": "tensor", "learning_rate": LEARNING_RATE, "steps": options.steps}},
    } | measured_before(options.json, sizes, most)
    for size in sizes:
        largest = size == most
        table = Table(everything, reference, SUBSETS[size])
        rows = references(table)
        for row in ROWS:
            if options.quick:
                row = replace(row, alphas=row.alphas[1:3] or row.alphas, seeds=row.seeds[:1])
            entry, sweep = table.measure(row)
            rows.append(entry)
            if largest:
                results["alpha_sweep"] += [
                    {"tasks": size, "method": row.name, "alpha": alpha, "accuracy": score}
                    for alpha, score in sweep.items()
                ]
        rows += learned(table, {row["method"]: row["alpha"] for row in rows}, options.steps)
        matrices = layers(everything.trained, {name: everything.experts[name] for name in table.names})
        results["rows"] += rows
        results["interference"] += interferences(rows, matrices)
        if largest:
            results["layers"] = matrices
        record(options.json, results, SEEDS, added=set(sizes) != set(SUBSETS))


if __name__ == "__main__":
    main()
