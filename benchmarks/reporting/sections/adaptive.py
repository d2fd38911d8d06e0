"""Input-adaptive models: MASS, its routers, and the baselines."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.reporting.formats import number, percent
from benchmarks.reporting.parts import Axis, Bars, Figure, Lines, Part, Table, Text

Rows = Mapping[str, Mapping[str, Any]]
BATCHES = "MASS, batches"
NAMES = """
**MASS** finds the experts that fit an input (at most K, of weight η or more), merges them and answers with the best of
their heads ([adaptive](adaptive.md)); heads are compared by raw logit, by probability, or by posterior (probability
times the router's weight). **SMILE** chooses low-rank experts for every token and layer; **Twin-Merging** adds low-rank
residuals of the experts to a shared merge, by a router trained on validation sentences; these two answer with the head
that most of their gates vote for. The base, task arithmetic and TSV-Merge are one merge for all inputs, and **WeMoE**
mixes task vectors by gates in the MLP blocks, adapted to unlabelled validation sentences by lowering the entropy of the
answers: none of these chooses a task, so every head takes part.
"""


def parts(results: Mapping[str, Any]) -> Iterator[Part]:
    models, fine, sentences = results["models"], results["fine_tuned"], results["samples"]
    yield Text(
        f"{len(fine)} MiniLM experts, {sentences} test sentences of each task, given without the task; the experts "
        f"themselves reach {percent(sum(fine.values()) / len(fine))} % on average. Normalised accuracy under three "
        "rules: the model is told the task; it is not, and the label must be right (polarity tasks share theirs); it "
        "is not, and task and label must both be right."
    )
    steps = results.get("wemoe_steps")
    yield Text(NAMES + (f" WeMoE's gates took {steps} steps." if steps else ""))
    yield from _compared(results, models, fine, "")
    single, batches = _apart(models)
    caption = (
        "Single sentences. Normalised accuracy, %, ± one standard error over sentences; share of tasks found, %; "
        "multiply-adds over one forward pass, switches between sets included (–: not measured or not defined)"
    )
    yield _table(single, caption, results)
    yield from _figure(results, single)
    yield from _batches(results, batches)
    if distinct := results.get("distinct"):
        yield from _distinct(results, distinct)
    yield from _costs(results)
    yield from _sensitivity(results)


def error(row: Mapping[str, Any], fine: Mapping[str, float], sentences: int, rule: str = "label") -> float | None:
    """Standard error of a normalised accuracy: sentences are drawn, tasks and experts are given."""
    if rule not in (per_task := row.get("per_task", {})):
        return None
    found = (p * (1 - p) / sentences / fine[task] ** 2 for task, p in per_task[rule].items())
    return math.sqrt(math.fsum(found)) / len(per_task[rule])


def difference_error(
    one: Mapping[str, Any], other: Mapping[str, Any], fine: Mapping[str, float], sentences: int
) -> tuple[float, bool] | None:
    """Standard error of a difference of normalised accuracies, and whether it is of pairs: on the same sentences, where
    the answers to each of them are stored; otherwise as if the sentences were others."""
    if "right" in one and "right" in other:
        total = 0.0
        for task, marks in one["right"].items():
            gaps = [int(a) - int(b) for a, b in zip(marks, other["right"][task], strict=True)]
            mean = sum(gaps) / len(gaps)
            total += sum((gap - mean) ** 2 for gap in gaps) / len(gaps) ** 2 / fine[task] ** 2
        return math.sqrt(total) / len(one["right"]), True
    errors = [error(row, fine, sentences) for row in (one, other)]
    return None if None in errors else (math.hypot(*(e for e in errors if e is not None)), False)


def against(gap: float, around: float) -> str:
    """A difference in standard errors."""
    if abs(gap) <= around:
        return "within one standard error"
    return "more than one standard error, less than two" if abs(gap) <= 2 * around else "more than two standard errors"


def _apart(models: Rows) -> tuple[Rows, Rows]:
    """Rows of single sentences, and of batches."""
    batches = {name: row for name, row in models.items() if name.startswith(BATCHES)}
    return {name: row for name, row in models.items() if name not in batches}, batches


def _tuned(results: Mapping[str, Any]) -> str:
    """The row of MASS with the settings that validation sentences chose."""
    return f"MASS, heads by {results.get('tuned', {}).get('settings', {}).get('score', 'logit')}"


def _compared(results: Mapping[str, Any], models: Rows, fine: Mapping[str, float], where: str) -> Iterator[Part]:
    """MASS as tuned against the best baseline, both on single sentences."""
    rest = {n: row["label_normalised"] for n, row in models.items() if "MASS" not in n and "label_normalised" in row}
    name = _tuned(results)
    if name not in models or not rest:
        return
    sentences = results["samples"]
    best = max(rest, key=lambda n: rest[n])
    mine, gap = models[name]["label_normalised"], models[name]["label_normalised"] - rest[best]
    own = error(models[name], fine, sentences)
    text = (
        f"Single sentences{where}, label right: MASS as tuned on validation sentences keeps {percent(mine)} %"
        f"{f' ± {percent(own)}' if own is not None else ''} (one standard error), the best of the other models there "
        f"{percent(rest[best])} % ({best})."
    )
    if found := difference_error(models[name], models[best], fine, sentences):
        around, paired = found
        kind = "on the same sentences" if paired else "taken as independent"
        text += (
            f" The difference is {100 * gap:+.1f} ± {percent(around)} points over {len(fine) * sentences} sentences "
            f"({kind}): {against(gap, around)}."
        )
    yield Text(text)


def _table(models: Rows, caption: str, results: Mapping[str, Any], fine: Mapping[str, float] | None = None) -> Table:
    keys = ("pair_normalised", "task", "task_top3")
    rows = []
    for name, row in models.items():
        label = percent(row.get("label_normalised"))
        around = error(row, fine or results["fine_tuned"], results["samples"])
        label += f" ± {percent(around)}" if around is not None and not name.startswith(BATCHES) else ""
        cells = [percent(row.get("told_normalised")), label, *(percent(row.get(key)) for key in keys)]
        # The costs were measured with the whole library.
        forwards = row.get("forwards", _forwards(name, results) if fine is None else None)
        rows.append([name, *cells, number(forwards)])
    columns = ["", "told the task", "label right", "task and label right", "task found", "among first 3", "forwards"]
    return Table(columns, rows, caption)


def _forwards(name: str, results: Mapping[str, Any]) -> float | None:
    """What a row of MASS costs; how heads are compared costs nothing."""
    variants = {
        "MASS, heads by": ("as tuned", "single_all"),
        "MASS, one polarity head": ("as tuned", "single_all"),
        "MASS, K = 1, heads by": ("K = 1", "single_all"),
        f"{BATCHES}, 4 probes, heads by": ("as tuned", "batch_first"),
        f"{BATCHES}, 4 probes, K = 1, heads by": ("K = 1", "batch_first"),
    }
    for start, (variant, kind) in variants.items():
        if name.startswith(start):
            costs = results.get("costs", {}).get(variant, {})
            return next((cost["ratio"] for key, cost in costs.items() if key.startswith(kind)), None)
    return None


def _figure(results: Mapping[str, Any], single: Rows) -> Iterator[Part]:
    known = [name for name, row in single.items() if "label_normalised" in row]
    rules = {"label right": "label", "task and label right": "pair"}
    fine, sentences = results["fine_tuned"], results["samples"]
    series = {label: [single[n].get(f"{rule}_normalised") for n in known] for label, rule in rules.items()}
    errors = {label: [error(single[n], fine, sentences, rule) or 0.0 for n in known] for label, rule in rules.items()}
    bars = Bars(known, series, Axis("normalised accuracy, task unknown", percent=True), errors=errors, dots=True)
    yield Figure(
        "adaptive_models",
        "Normalised accuracy of input-adaptive models on single sentences of unknown task, with one standard error",
        [bars],
    )


def _batches(results: Mapping[str, Any], batches: Rows) -> Iterator[Part]:
    """Sentences that come as batches of one task: an easier question, which no baseline was asked."""
    if not batches:
        return
    name = _tuned(results).replace("MASS", f"{BATCHES}, 4 probes")
    text = (
        "Batches are an easier question: the sentences of one are known to be of one task, which one is not, and MASS "
        "routes all of them by its first four. No other model was given that, so these rows compare with none above."
    )
    if found := results.get("batches"):
        text += f" {_routed(found)}"
    if name in batches:
        text += f" As tuned MASS keeps {percent(batches[name]['label_normalised'])} % of the labels."
        if ways := [row["label_normalised"] for other, row in batches.items() if other != name]:
            text += (
                f" Its other settings keep {percent(min(ways))} to {percent(max(ways))} %; which of them is best was "
                "not chosen on other batches."
            )
    yield Text(text)
    yield _table(batches, "Batches of one task, columns as above; forwards are those of a set that is new", results)


def _routed(found: Mapping[str, Mapping[str, int]]) -> str:
    count, right = (sum(row[key] for row in found.values()) for key in ("batches", "right"))
    each = sum(row["sentences"] for row in found.values()) / count
    missed = [
        f"{task} ({row['right']} of {row['batches']})" for task, row in found.items() if row["right"] < row["batches"]
    ]
    wrong = f"; the tasks with a wrong one are {', '.join(missed)}" if missed else ""
    return (
        f"There are {count} batches of {each:.0f} sentences, and {right} of {count} go to their own task first{wrong}."
    )


def _distinct(results: Mapping[str, Any], distinct: Mapping[str, Any]) -> Iterator[Part]:
    single, batches = _apart(distinct["models"])
    fine = distinct["fine_tuned"]
    yield from _compared(results, single, fine, f" of tasks that differ ({', '.join(fine)})")
    yield _table(single, "Single sentences of tasks that differ", results, fine)
    if batches:
        if found := distinct.get("batches"):
            yield Text(f"Batches of tasks that differ: {_routed(found)[0].lower()}{_routed(found)[1:]}")
        yield _table(batches, "Batches of tasks that differ", results, fine)


def _costs(results: Mapping[str, Any]) -> Iterator[Part]:
    steps = ("first_pass", "router", "second_pass", "switch", "ratio")
    rows = [
        [name, kind.replace("_", ", "), *(f"{cost[step]:.2f}" for step in steps)]
        for name, kinds in results.get("costs", {}).items()
        for kind, cost in kinds.items()
    ]
    if rows:
        columns = ["", "inputs", "first pass", "router", "second pass", "switch", "in all"]
        yield Table(columns, rows, "Multiply-adds of MASS over those of one forward pass")
    if sets := results.get("sets"):
        yield from _sets(sets, results.get("stored", {}))
    rows = [
        [dtype, f"{row['relative']:.2f}×", f"{row['relative_to_trained']:.2f}×", percent(row["told_normalised"])]
        for dtype, row in results.get("stored", {}).items()
    ]
    if rows:
        columns = ["factors", "numbers, of the base's", "bytes, of the trained tensors'", "experts kept, %"]
        yield Table(columns, rows, "What is stored, and what is left of the experts")


def _sets(sets: list[Mapping[str, Any]], stored: Rows) -> Iterator[Part]:
    """What a set of experts costs by its size, and how many of them a cache of the default size holds."""
    rows = [
        [
            str(row["experts"]),
            str(row["sets"]),
            f"{row['beside']:.2f}",
            f"{row['switch']:.1f}",
            *(percent(row[key], 0) if row["switch"] else "–" for key in ("gram", "eigen")),
            f"{row['bytes'] / 1e6:.1f} MB",
        ]
        for row in sets
    ]
    columns = ["experts", "sets", "second pass", "switch to a new set", "… Gram matrices, %", "… eigenproblems, %"]
    caption = (
        f"Multiply-adds of a set of experts over a forward pass of {sets[0]['tokens']} tokens, the mean over all sets: "
        "second pass with updates beside the layers (1 with whole matrices), switch, and what the cache keeps of it"
    )
    yield Table([*columns, "kept"], rows, caption)
    base = next((row["base_bytes"] for row in stored.values() if "base_bytes" in row), None)
    if base is not None:
        count, total, sums = 0, 0.0, []
        for row in sets:
            count, total = count + row["sets"], total + row["sets"] * row["bytes"]
            sums.append(f"{count} sets of at most {row['experts']} take {total / 1e6:.0f} MB")
        yield Text(f"By default the cache holds twice the module, here {2 * base / 1e6:.0f} MB: {', '.join(sums)}.")


def _sensitivity(results: Mapping[str, Any]) -> Iterator[Part]:
    size = results.get("sizes", {}).get("tuning")
    where = f"validation sentences{f' ({size} of each task)' if size else ''}, absolute accuracy"
    if tuned := results.get("tuned"):
        chosen = ", ".join(f"{name} {value}" for name, value in tuned["settings"].items())
        yield Text(
            f"Chosen on validation sentences: the first {percent(tuned['share'], 0)} % of the layers, {chosen}; the "
            f"single layer that finds most tasks is `{tuned['layer']}`. The tables below are of those sentences and "
            "in absolute accuracy, so their numbers do not compare with the normalised ones of test sentences above."
        )
    panels = []
    choices = results.get("threshold_and_top", ())
    if choices:
        tops = sorted({row["top"] for row in choices})
        rows = [
            [f"{row['threshold']:.2f}", str(row["top"]), percent(row["accuracy"]), f"{row['set_size']:.2f}"]
            for row in choices
        ]
        caption = f"Sensitivity to threshold η and top K: {where}"
        yield Table(["η", "K", "label right, %", "experts chosen"], rows, caption)
        lines = {f"K = {k}": [(r["threshold"], r["accuracy"]) for r in choices if r["top"] == k] for k in tops}
        axis = Axis("label right, validation sentences", percent=True)
        panels.append(Lines(lines, Axis("threshold η"), axis))
    if filters := results.get("redundancy", ()):
        rows = [
            [f"{row['redundancy']:.2f}", str(len(row["accepted"])), percent(row["accuracy"]), percent(row.get("label"))]
            for row in sorted(filters, key=lambda row: row["redundancy"])
        ]
        caption = (
            "Sensitivity to the redundancy filter ε (experts with a larger cosine to an accepted one stay out of the "
            f"fixed merge): {where}"
        )
        yield Table(["ε", "experts accepted", "task found, %", "label right, %"], rows, caption)
    if layers := results.get("layers", ()):
        found = [(place, row["accuracy"]) for place, row in enumerate(layers) if row["accuracy"] is not None]
        axes = Axis("layer, in the order of the encoder"), Axis("task found", percent=True)
        panels.append(Lines({"one layer": found}, *axes))
    if panels:
        yield Figure(
            "adaptive_sensitivity",
            "Accuracy of MASS by threshold and top K, and tasks found by layer, on validation sentences",
            panels,
        )
