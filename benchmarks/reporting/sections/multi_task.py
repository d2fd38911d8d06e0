"""Experts of several tasks in one encoder: every static method, the ablation of TSV-Merge, interference by layer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks import answers
from benchmarks.answers import Answers, Score
from benchmarks.reporting.formats import lead, percent, points, signed
from benchmarks.reporting.parts import Axis, Bars, Figure, Lines, Part, Table, Text
from benchmarks.reporting.sections import interference
from merganser.analysis.mergeability import rank_correlation
from merganser.tuning.expected_losses import SLOPE

BASE, EXPERTS, SUM = "base encoder", "fine-tuned experts", "task arithmetic"
#: Rows that are not merges, and those that have their own table.
REFERENCES = (BASE, EXPERTS)
ABLATION = "TSV-M without"
#: What needs no validation data.
UNTUNED = "TSV-M, α = 1"
#: What the others are compared with in pairs.
RIVALS = ("TSV-M", "Iso-C")
#: Tasks with two classes: a merge that is right where the expert is wrong, or the other way round, answers otherwise.
BINARY = ("mr", "sst2", "subj", "cr", "mpqa")
RULE = "bold: the best, and all within two standard errors of the paired difference"


#: Why a method can be ahead of the sum of the task vectors.
REASONS = {
    "Iso-C": (
        "Iso-C and Iso-CTS flatten the spectrum: directions that only one task changed count as much as directions "
        "that several tasks share, which dominate a sum. That tasks with many classes gain most agrees with this."
    ),
    "TSV-M": (
        "TSV-M keeps the leading directions of every task and makes them orthogonal, so that no task covers the "
        "directions of another."
    ),
}
REASONS["Iso-CTS"] = REASONS["Iso-C"]


class Sheet:
    """The stored rows of one number of tasks, by method."""

    def __init__(self, results: Mapping[str, Any], count: int) -> None:
        self.count = count
        self.setting = results["sets"][str(count)]
        self.stored = {row["method"]: row for row in results["rows"] if row["tasks"] == count}
        self.answers: dict[str, Answers] = {
            name: answers.read(row["answers"], self.setting["sentences"]) for name, row in self.stored.items()
        }
        self.experts = self.answers[EXPERTS]
        self.merges = {name: own for name, own in self.answers.items() if name not in REFERENCES}
        self.listed = {name: own for name, own in self.merges.items() if not name.startswith(ABLATION)}
        self.below = answers.leaders(self.listed, self.experts)

    @property
    def seeds(self) -> int:
        return len(self.experts)

    def score(self, method: str) -> Score:
        return answers.difference(self.answers[method], None, self.experts)

    def best(self) -> str:
        return max(self.listed, key=lambda name: self.score(name).mean)

    def tied(self) -> list[str]:
        """Methods that are not clearly behind the best one."""
        best = self.best()
        return [name for name in self.below if name != best and self.leads(name)]

    def note(self, method: str) -> str:
        """Say so where a row has fewer seeds than the experts."""
        count = len(self.answers[method])
        return f" ({count} seed{'s' if count > 1 else ''})" if count < self.seeds else ""

    def leads(self, method: str) -> bool:
        return method in self.below and (self.below[method].mean == 0 or not self.below[method].clear)

    def cell(self, method: str) -> str:
        """Normalised accuracy with its standard error, in bold where it leads; the base and the experts never do."""
        score = self.score(method)
        text = percent(score.mean) if method == EXPERTS else f"{percent(score.mean)} ± {percent(score.error)}"
        text += self.note(method)
        return f"**{text}**" if self.leads(method) else text


def sheets(results: Mapping[str, Any]) -> dict[int, Sheet]:
    counts = sorted({row["tasks"] for row in results["rows"]})
    return {count: Sheet(results, count) for count in counts}


def parts(results: Mapping[str, Any]) -> Iterator[Part]:
    found = sheets(results)
    first = next(iter(found.values()))
    tested = sorted({count for sheet in found.values() for count in sheet.setting["sentences"].values()})
    each = ", ".join(f"{sheet.setting['validation']} for {count}" for count, sheet in found.items())
    seeds = " or ".join(map(str, sorted({sheet.seeds for sheet in found.values()})))
    yield Text(
        f"MiniLM experts of {listing(found)} tasks are merged into one encoder. Each was fine-tuned from the same "
        "base: the upper half of the encoder together with a randomly initialised head, while the embeddings and the "
        f"lower half were frozen. Every task uses its own head and has {tested[0]} to {tested[-1]} test sentences. "
        f"Fine-tuning seeds: {seeds}. The scale α of each method is chosen on labelled validation sentences of the "
        f"first seed, the same for all methods (of each task: {each} tasks), and kept for the other seeds."
    )
    yield from map(_verdict, found.values())
    yield quality(results)
    if set(RIVALS) <= set(first.merges):
        yield paired(first)
    yield from _chosen(found)
    yield Text(_goals(found))
    reasons = dict.fromkeys(REASONS[sheet.best()] for sheet in found.values() if sheet.best() in REASONS)
    yield Text(" ".join([*map(_why, found.values()), *reasons]))
    if {"TSV-M", "TSV-M without orthogonalisation", "TSV-M without low rank", SUM} <= set(first.merges):
        yield ablation(results)
    yield _picture(found)
    if results.get("ranks"):
        yield from _ranks(results, first)
    yield _sweep(first)
    if binary := [name for name in first.setting["tasks"] if name in BINARY]:
        yield from _disagreement(found, binary)
    if results.get("interference"):
        yield from interference.totals(results["interference"], {n: _scores(sheet) for n, sheet in found.items()})
    if results.get("layers"):
        yield from interference.layers(results["layers"], first.count)
    for sheet in found.values():
        yield _tasks(sheet)


def image_parts(results: Mapping[str, Any]) -> Iterator[Part]:
    found = sheets(results)
    sheet = next(iter(found.values()))
    yield Text(
        f"EfficientNet-Lite0 experts of {sheet.count} image tasks are merged into one backbone. The tasks are all "
        "classes, some classes and coarse classes of MNIST, Fashion-MNIST and CIFAR-10, inverted colours, and which "
        "way is up. Backbone and head were trained together for two epochs of 6,000 images, with the running "
        "statistics of the base. Every task uses its own head and has "
        f"{max(sheet.setting['sentences'].values())} test images. Methods for matrices treat convolution kernels as "
        "matrices (`convolutions: true`), which they average by default. α is chosen as for text, on "
        f"{sheet.setting['validation']} validation images of each task. Fine-tuning "
        f"seeds: {sheet.seeds}."
    )
    yield from map(_verdict, found.values())
    yield quality(results)
    if set(RIVALS) <= set(sheet.merges):
        yield paired(sheet)
    yield from _chosen(found)
    yield Text(_goals(found, room=0.7))
    if {"TSV-M", "TSV-M without orthogonalisation", "TSV-M without low rank", SUM} <= set(sheet.merges):
        yield ablation(results)
    yield _picture(found, "multi_task_images", "EfficientNet-Lite0")
    yield _tasks(sheet)


def _why(sheet: Sheet) -> str:
    """Return the tasks on which the best merge gains most over the sum."""
    best = sheet.best()
    gains = {task: by_task(sheet, best)[task] - by_task(sheet, SUM)[task] for task in sheet.setting["tasks"]}
    most = sorted(gains, key=lambda task: gains[task], reverse=True)[:3]
    named = ", ".join(f"{task} ({signed(100 * gains[task], 0)} points)" for task in most)
    return f"With {sheet.count} tasks, {best} gains most over {SUM} on {named}."


def by_task(sheet: Sheet, method: str) -> dict[str, float]:
    """Accuracy on each task, mean over seeds."""
    found = [answers.accuracies(sheet.answers[method], seed) for seed in sheet.answers[method]]
    return {task: _mean([each[task] for each in found]) for task in sheet.setting["tasks"]}


def listing(names: Iterable[object]) -> str:
    """Join names as a sentence lists them."""
    *rest, last = map(str, names)
    return f"{', '.join(rest)} and {last}" if rest else last


def _verdict(sheet: Sheet) -> Text:
    best = sheet.best()
    near = sheet.tied()
    gain = answers.difference(sheet.merges[best], sheet.merges[SUM], sheet.experts)
    return Text(
        f"**{sheet.count} tasks.** The base with the experts' heads keeps {percent(sheet.score(BASE).mean)} % of their "
        f"accuracy, {SUM} {percent(sheet.score(SUM).mean)} %, and the best merge, {best}, "
        f"{percent(sheet.score(best).mean)} %. This is {percent(gain.mean)} ± {percent(gain.error)} points more "
        f"than {SUM} ({gain.mean / gain.error:.1f} standard errors)."
        + (f" {', '.join(near)} {'is' if len(near) == 1 else 'are'} not clearly worse." if near else "")
    )


def _goals(found: Mapping[int, Sheet], room: float = 0.85) -> str:
    """Whether the table separates methods, and whether there is room to."""
    lines = []
    for count, sheet in found.items():
        best = sheet.best()
        gain = answers.difference(sheet.merges[best], sheet.merges[SUM], sheet.experts)
        base = sheet.score(BASE).mean
        lines.append(
            f"{count} tasks: base at most {percent(room, 0)} % – {'met' if base <= room else 'not met'} "
            f"({percent(base)} %); best merge three standard errors beyond {SUM} – "
            f"{'met' if gain.mean >= 3 * gain.error else 'not met'} ({gain.mean / gain.error:.1f})."
        )
    return (
        "Standard errors add the variance of the paired differences over test items, averaged over seeds, and the "
        "variance of the means over seeds. Goals: " + " ".join(lines)
    )


def _chosen(found: Mapping[int, Sheet]) -> Iterator[Text]:
    """What choosing the scale on validation data is worth, where a method has a scale without data."""
    gaps = {
        count: answers.difference(sheet.merges["TSV-M"], sheet.merges[UNTUNED], sheet.experts)
        for count, sheet in found.items()
        if {"TSV-M", UNTUNED} <= sheet.merges.keys()
    }
    if gaps:
        said = ", ".join(f"{points(gap)} points with {count} tasks" for count, gap in gaps.items())
        yield Text(f"Choosing α on validation data instead of taking 1 changes TSV-M by {said}.")


def quality(results: Mapping[str, Any]) -> Table:
    """Accuracy and normalised accuracy of every method for each number of tasks."""
    found = sheets(results)
    names = [name for name in _ordered(found) if not name.startswith(ABLATION)]
    return _full(found, {name: name for name in names}, f"Accuracy of merges, %; {RULE}")


def paired(sheet: Sheet) -> Table:
    """What every method keeps more than the two that others are measured against, sentence by sentence."""
    cells = []
    for name in sorted(sheet.listed, key=lambda name: sheet.score(name).mean, reverse=True):
        differences = [answers.difference(sheet.merges[name], sheet.merges[rival], sheet.experts) for rival in RIVALS]
        cells.append([name, *("–" if name == r else lead(d) for r, d in zip(RIVALS, differences, strict=True))])
    columns = [f"{sheet.count} tasks", *(f"minus {rival}" for rival in RIVALS)]
    caption = "Paired differences of normalised accuracy, points; bold: ahead by more than two standard errors"
    return Table(columns, cells, caption)


def ablation(results: Mapping[str, Any]) -> Table:
    """Low rank and orthogonal, either, neither: the sum of the task vectors as they are."""
    names = {
        "low rank and orthogonal (TSV-M)": "TSV-M",
        "low rank alone": "TSV-M without orthogonalisation",
        "orthogonal alone": "TSV-M without low rank",
        "neither (task arithmetic)": SUM,
    }
    found = {count: sheet for count, sheet in sheets(results).items() if set(names.values()) <= set(sheet.merges)}
    return _full(found, names, "The ablation of TSV-M; bold as above")


def _full(found: Mapping[int, Sheet], names: Mapping[str, str], caption: str) -> Table:
    """Normalised accuracy, α and, where there is room for it, accuracy."""
    whats = [", normalised", ", α"] if len(found) > 1 else [", accuracy", ", normalised", ", α"]
    cells = []
    for label, name in names.items():
        line = [label]
        for sheet in found.values():
            if name not in sheet.answers:
                line += ["–"] * len(whats)
                continue
            alpha = sheet.stored[name]["alpha"]
            accuracy = answers.summary(sheet.answers[name], sheet.experts)["accuracy"]
            line += [percent(accuracy), sheet.cell(name), "–" if alpha is None else f"{alpha:g}"][-len(whats) :]
        cells.append(line)
    columns = ["", *(f"{count} tasks{what}" for count in found for what in whats)]
    return Table(columns, cells, caption)


def _ordered(found: Mapping[int, Sheet]) -> list[str]:
    names = list(dict.fromkeys(name for sheet in found.values() for name in sheet.merges))
    return [BASE, *names, EXPERTS]


def _picture(found: Mapping[int, Sheet], name: str = "multi_task", network: str = "MiniLM") -> Figure:
    first = next(iter(found.values()))
    names = sorted(first.listed, key=lambda name: first.score(name).mean)
    series: dict[str, list[float | None]] = {
        f"{count} tasks": [sheet.score(name).mean if name in sheet.merges else None for name in names]
        for count, sheet in found.items()
    }
    bars = Bars(names, series, Axis("normalised accuracy", percent=True), dots=True)
    return Figure(name, f"Normalised accuracy of merges of {listing(found)} {network} experts by method", [bars])


def _ranks(results: Mapping[str, Any], sheet: Sheet) -> Iterator[Part]:
    own = {"0": sheet.experts[next(iter(sheet.experts))]}
    rows = [row for row in results["ranks"] if row["tasks"] == sheet.count]
    points = []
    for row in rows:
        given = answers.read(row["answers"], sheet.setting["sentences"])
        points.append((row["share"], row["alpha"], answers.difference(given, None, own)))
    default = sheet.merges["TSV-M"]["0"]
    points.append((1 / sheet.count, sheet.stored["TSV-M"]["alpha"], answers.difference({"0": default}, None, own)))
    points.sort(key=lambda point: point[0])
    cells = [
        [f"{100 * share:.3g}", f"{alpha:g}", f"{percent(s.mean)} ± {percent(s.error)}"] for share, alpha, s in points
    ]
    yield Table(
        ["components kept of each task, %", "α", "normalised, %"],
        cells,
        f"TSV-M by rank, {sheet.count} tasks, one seed ({100 / sheet.count:.3g} % is its default, 1/T)",
    )


def _sweep(sheet: Sheet) -> Figure:
    groups: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    for name, row in sheet.stored.items():
        points = sorted((float(alpha), score) for alpha, score in row["sweep"].items())
        if points and not name.startswith(ABLATION):
            groups[points[-1][0] > 1][name] = points
    titles = ("sums of task vectors", "means and spectral merges")
    axes = Axis("α"), Axis("validation accuracy", percent=True)
    panels = [Lines(group, *axes, title) for group, title in zip(groups, titles, strict=True) if group]
    return Figure("multi_task_alpha", f"Validation accuracy by scaling coefficient, {sheet.count} tasks", panels)


def _disagreement(found: Mapping[int, Sheet], tasks: Sequence[str]) -> Iterator[Part]:
    """How well the disagreement of a merge with the experts tells its loss, where right and wrong show both."""
    cells = []
    for count, sheet in found.items():
        seed = next(iter(sheet.experts))
        points = []
        for own in sheet.merges.values():
            pairs = [(own[seed][task], sheet.experts[seed][task]) for task in tasks]
            halves = [len(right) // 2 for right, _ in pairs]
            differs = [(a[:half] != b[:half]).mean() for (a, b), half in zip(pairs, halves, strict=True)]
            kept = [a[half:].mean() / b[half:].mean() for (a, b), half in zip(pairs, halves, strict=True)]
            points.append((_mean(differs), 1 - _mean(kept)))
        disagreement, lost = zip(*points, strict=True)
        expected = [SLOPE * share for share in disagreement]
        rho = rank_correlation(disagreement, lost)
        columns = (percent(_mean(values)) for values in (lost, expected))
        cells.append([str(count), str(len(points)), f"{rho:.2f}", *columns])
    yield Text(
        f"Without labels, the share of sentences that a merge answers otherwise than the experts tells what it loses: "
        f"measured on half of the test sentences of the tasks with two classes ({', '.join(tasks)}), it ranks methods "
        "by the loss on the other half. The line that `mg.tuning.auto` estimates losses with was fitted to pairs."
    )
    yield Table(
        ["tasks merged", "methods", "ρ", "mean loss, %", "expected from disagreement, %"],
        cells,
        "Losses of merges, and how often these answer otherwise than the experts",
    )


def _scores(sheet: Sheet) -> dict[str, float]:
    return {name: sheet.score(name).mean for name in sheet.merges}


def _tasks(sheet: Sheet) -> Table:
    """A line for every task, the methods in columns: base, sum, the best two merges, experts."""
    ranked = sorted(sheet.listed, key=lambda name: sheet.score(name).mean, reverse=True)
    names = list(dict.fromkeys((BASE, SUM, *(name for name in ("TIES", "TSV-M") if name in ranked), *ranked[:2])))
    names.append(EXPERTS)
    found = {name: by_task(sheet, name) for name in names}
    cells = [[task, *(percent(found[name][task]) for name in names)] for task in sheet.setting["tasks"]]
    return Table(["", *names], cells, f"Accuracy on each of {sheet.count} tasks, %, mean over seeds")


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
