"""Merging experts into one backbone: every static method, for 8, 14 and 20 text tasks or 10 image tasks.

    python -m benchmarks.multi_task [--cache ZOO] [--tasks 8 14 20] [--seeds 0 1 2] [--methods NAME …] [--json FILE]
    python -m benchmarks.multi_task --tasks 10 [--seeds 0] [--json FILE]

Experts are those of `benchmarks.zoo.text` (MiniLM) and `benchmarks.zoo.image_experts` (EfficientNet-Lite0), trained if
they are missing; each kind has a FILE of its own. "Sentences" stands for images too.

α of a method is the one of a grid with the best mean accuracy on labelled validation sentences, the same for all
methods, with the experts of the first seed (a grid grows where its end is the best); the other seeds take the same α.
RegMean, RegMean++ and ESM also see 32 of the validation sentences of each task, without labels. Scores are of test
sentences, each answered through its task's own head. A method is one line of `METHODS`.

What FILE holds of the same experts stays and is not measured again: to add a method, a seed or a number of tasks, run
the command once more. `--quick`: four tasks, few sentences, a few methods.

Stored in `results`:

- `sets`: by number of tasks the `tasks`, the test `sentences` of each, and `validation`, sentences of each task;
- `rows`: one of every number of tasks and method with `alpha` (null where there is none), `sweep` (validation accuracy
  by α) and `answers`: by seed and task one bit for each test sentence, right or wrong (see `benchmarks.answers`);
- `ranks`: TSV-M with other shares of the singular components, as rows, α chosen for each;
- `interference`: for every number of tasks STI of the first seed's experts summed over matrices, `truncated` to rank
  n/T, `full` with all components, and `after` TSV-Merge; `layers`: every matrix for the first number of tasks.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import answers
from benchmarks.experts import Experts, State
from benchmarks.image_experts import load_image_experts
from benchmarks.records import record
from benchmarks.text_experts import TextExperts, load_experts
from benchmarks.text_interference import layers, totals
from benchmarks.text_statistics import grams, merged_grams
from benchmarks.zoo.cards import add_locations
from benchmarks.zoo.image_tasks import IMAGE_TASKS
from benchmarks.zoo.text_tasks import TASK_SETS, TEST

#: For sums of task vectors, and for means and spectral merges, whose natural coefficient is about 1.
SUMS = (0.1, 0.2, 0.3, 0.45)
MEANS = (0.7, 1.0, 1.4, 2.0)
#: A grid whose end is the best grows by this factor, and so often at most.
GROWTH, GROWN = 1.4, 3
#: Labelled validation sentences of all tasks together.
VALIDATION = 512
#: The number of image tasks, and how many test images each has.
IMAGES, TEST_IMAGES = 10, 400
SETS = {**TASK_SETS, IMAGES: tuple(IMAGE_TASKS)}
#: Shares of the singular components that TSV-M keeps of every task, beside its own 1/T.
SHARES = (0.01, 0.03, 0.06, 0.25, 0.5, 1.0)
QUICK = ("task arithmetic", "TSV-M")


@dataclass(frozen=True)
class Method:
    """A line of the table: a method of `mg.merge`, the grid of its α, its parameters. One α is no choice."""

    name: str
    method: str
    alphas: tuple[float, ...] = MEANS
    parameters: Mapping[str, Any] = field(default_factory=dict)
    #: Numbers of tasks at which it is measured.
    sets: tuple[int, ...] = tuple(TASK_SETS)
    #: What it has to know of the experts' inputs (`benchmarks.text_statistics`).
    statistics: Callable[[TextExperts, Sequence[str]], Any] | None = None

    def measured_at(self, count: int) -> bool:
        """Whether it has a line at this number of tasks: of the image tasks, if it needs no statistics of texts."""
        return count in self.sets or (count == IMAGES and 8 in self.sets and self.statistics is None)


METHODS = (
    Method("weight averaging", "linear", (1.0,)),
    Method("task arithmetic", "task_arithmetic", SUMS),
    Method("TIES", "ties", MEANS, {"density": 0.2}),
    Method("DARE", "dare_linear", SUMS, {"density": 0.2}, (8,)),
    Method("Breadcrumbs", "breadcrumbs", SUMS, {"density": 0.85, "gamma": 0.01}, (8,)),
    Method("Consensus TA", "consensus_ta", SUMS, {"threshold": 0.4, "agree": 2}),
    Method("MagMax", "magmax", MEANS, {}, (8,)),
    Method("subspace boosting", "subspace_boosting", SUMS, {}, (8,)),
    Method("PCB", "pcb", MEANS, {"density": 0.2}, (8,)),
    Method("Localize-and-Stitch", "localize_stitch", MEANS, {}, (8,)),
    Method("OPCM", "opcm", MEANS, {}, (8,)),
    Method("WUDI", "wudi", MEANS),
    Method("ACE", "ace"),
    Method("Iso-C", "iso_c"),
    Method("Iso-CTS", "iso_cts"),
    Method("TSV-M", "tsv"),
    Method("TSV-M, α = 1", "tsv", (1.0,)),
    Method("TSV-M, equal norms", "tsv", MEANS, {"norms": "equal"}, (8,)),
    Method("Iso-C, equal norms", "iso_c", MEANS, {"norms": "equal"}, (8,)),
    Method("RegMean", "regmean", MEANS, {"alpha": 0.95}, (8,), grams),
    Method("RegMean++", "regmean", MEANS, {"alpha": 0.95}, (8,), merged_grams),
    Method("ESM", "esm", statistics=grams),
    Method("TSV-M without orthogonalisation", "tsv", SUMS, {"orthogonalize": "none"}, (8,)),
    Method("TSV-M without low rank", "tsv", MEANS, {"low_rank": False}, (8,)),
)
BASE, EXPERTS = "base encoder", "fine-tuned experts"


@dataclass(frozen=True)
class Bench:
    """The experts of every seed for one number of tasks."""

    names: tuple[str, ...]
    seeds: Mapping[int, Experts[Any]]

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
        experts = next(iter(self.seeds.values()))
        scores = experts.scores(experts.weights(vector, alpha), self.names, "validation")
        return sum(scores.values()) / len(scores)

    def measure(self, method: Method, row: dict[str, Any]) -> dict[str, Any]:
        """Add what the row lacks: the choice of α, and the answers of every seed, which also seeds what is drawn."""
        for seed, experts in self.seeds.items():
            if str(seed) in row["answers"]:
                continue
            known = {"statistics": method.statistics(experts, self.names)} if method.statistics else {}
            vector = experts.task_vector(method.method, self.names, seed=seed, **known | dict(method.parameters))
            if row["alpha"] is None:
                sweep = self.sweep(vector, method.alphas) if len(method.alphas) > 1 else {}
                row["sweep"] = {str(alpha): sweep[alpha] for alpha in sorted(sweep)}
                row["alpha"] = best(sweep) if sweep else method.alphas[0]
            row["answers"][str(seed)] = self.packed(experts, experts.weights(vector, row["alpha"]))
        return row

    def packed(self, experts: Experts[Any], weights: State) -> dict[str, str]:
        return {name: answers.pack(bits.numpy()) for name, bits in experts.answers(weights, self.names).items()}

    def references(self) -> Iterator[dict[str, Any]]:
        """The untouched base, and the experts themselves."""
        base = {str(seed): self.packed(experts, experts.base) for seed, experts in self.seeds.items()}
        own = {
            str(seed): {name: answers.pack(bits.numpy()) for name, bits in experts.own_answers(experts.experts).items()}
            for seed, experts in self.seeds.items()
        }
        for name, found in ((BASE, base), (EXPERTS, own)):
            yield {"tasks": len(self.names), "method": name, "alpha": None, "sweep": {}, "answers": found}


def best(sweep: Mapping[float, float]) -> float:
    """The α with the highest score; of equal ones the smallest, which moves the base least."""
    return min(sweep, key=lambda alpha: (-sweep[alpha], alpha))


def show(row: Mapping[str, Any], experts: Mapping[str, Any], sentences: Mapping[str, int]) -> None:
    found = answers.summary(answers.read(row["answers"], sentences), answers.read(experts["answers"], sentences))
    label = f"{row['method']} {row['share']:g}" if "share" in row else row["method"]
    print(
        f"{row['tasks']} tasks, {label:<34} α {row['alpha']!s:<5} accuracy {found['accuracy']:.4f}  "
        f"normalised {found['normalised']:.4f} ± {found['error']:.4f}",
        flush=True,
    )


def kept_rows(stored: Mapping[str, Any], references: Sequence[Mapping[str, Any]]) -> dict[tuple[str, ...], Any]:
    """Rows of a stored file of the same number of tasks, if its experts answered as these do."""
    count = references[0]["tasks"]
    rows = [row for part in ("rows", "ranks") for row in stored.get(part, ()) if row["tasks"] == count]
    before = next((row["answers"] for row in rows if row["method"] == EXPERTS), None)
    now = references[1]["answers"]
    if before is None or any(before[seed] != now[seed] for seed in set(before) & set(now)):
        return {}
    return {(row["method"], *([str(row["share"])] if "share" in row else [])): row for row in rows}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, nargs="+", choices=SETS, default=[8])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="fine-tuning seeds of the experts")
    names = [method.name for method in METHODS]
    parser.add_argument("--methods", nargs="+", choices=names, metavar="NAME", default=names)
    parser.add_argument("--ranks", action="store_true", help="TSV-M by the share of components kept, first seed")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    add_locations(parser)
    options = parser.parse_args(arguments)
    if IMAGES in options.tasks and len(options.tasks) > 1:
        parser.error("image tasks have a file of their own: give --tasks 10 alone")
    stored: dict[str, Any] = (
        json.loads(options.json.read_text())["results"] if options.json and options.json.exists() else {}
    )
    results: dict[str, Any] = {"sets": {}, "rows": [], "ranks": [], "interference": [], "layers": [], **stored}
    for count in options.tasks:
        load, test = (load_image_experts, TEST_IMAGES) if count == IMAGES else (load_experts, TEST)
        tasks = SETS[count][:4] if options.quick else SETS[count]
        images, count = count == IMAGES, len(tasks)
        sizes = {"test": 40, "validation": 10} if options.quick else {"test": test, "validation": VALIDATION // count}
        loaded = {seed: load(options.cache, options.data, tasks, **sizes, seed=seed) for seed in options.seeds}
        bench = Bench(tasks, loaded)
        sentences = {name: len(task.test) for name, task in next(iter(loaded.values())).tasks.items()}
        references = list(bench.references())
        known = kept_rows(stored, references)
        for row in references:
            before = known.get((row["method"],))
            row["answers"] = (before["answers"] if before else {}) | row["answers"]
            known[(row["method"],)] = row
        results["sets"][str(count)] = {"tasks": list(tasks), "sentences": sentences, "validation": sizes["validation"]}
        lines: list[tuple[tuple[str, ...], Method, dict[str, Any]]] = [
            ((each.name,), each, {})
            for each in METHODS
            if each.name in (QUICK if options.quick else options.methods) and (options.quick or each.measured_at(count))
        ]
        if options.ranks:
            lines += [
                (("TSV-M", str(share)), Method("TSV-M", "tsv", MEANS, {"rank_fraction": share}), {"share": share})
                for share in SHARES
            ]
        experts = known[(EXPERTS,)]
        for row in references:
            show(row, experts, sentences)
        for key, method, more in lines:
            row = known.get(key) or {"tasks": count, "method": method.name, **more, "alpha": None, "answers": {}}
            known[key] = bench.measure(method, row)
            show(row, experts, sentences)
            for part in ("rows", "ranks"):
                own = [row for row in known.values() if ("share" in row) == (part == "ranks")]
                results[part] = [row for row in results[part] if row["tasks"] != count] + own
            record(options.json, results, seeds_of(results), added=True)
        if not images and all(row["tasks"] != count for row in results["interference"]):
            first = loaded[options.seeds[0]]
            matrices = layers(first.trained, first.experts)
            results["interference"].append({"tasks": count, **totals(first.trained, first.experts, matrices)})
            results["layers"] = results["layers"] or matrices
            record(options.json, results, seeds_of(results), added=True)


def seeds_of(results: Mapping[str, Any]) -> list[int]:
    return sorted({int(seed) for row in results["rows"] for seed in row["answers"]})


if __name__ == "__main__":
    main()
