"""Experts of several tasks in one encoder: every static method, the ablation of TSV-Merge, interference by layer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.reporting.formats import percent, standard_error
from benchmarks.reporting.parts import Axis, Bars, Figure, Lines, Part, Table, Text

#: Rows that are not merges, and those that have their own table.
REFERENCES = ("base encoder", "fine-tuned experts")
ABLATION = "TSV-M without"


def parts(results: Mapping[str, Any]) -> Iterator[Part]:
    rows = _by_method(results)
    sizes = sorted({row["tasks"] for row in results["rows"]})
    most = sizes[-1]
    merges = {name: row for name, row in rows.items() if name not in REFERENCES and most in row}
    ranked = sorted(merges, key=lambda name: merges[name][most]["normalised"], reverse=True)
    best, mean = ranked[0], rows["weight averaging"][most]
    tsv = merges["TSV-M"][most]
    answers = sum(results["sentences"][task]["test"] for task in results["subsets"][str(most)])
    yield Text(
        f"MiniLM experts of {most} tasks ({', '.join(results['subsets'][str(most)])}) merged into one encoder; each "
        f"task is answered through its own head. The base encoder under these heads already keeps "
        f"{percent(rows['base encoder'][most]['normalised'])} % of the experts' accuracy, averaging "
        f"{percent(mean['normalised'])} %, TSV-M {percent(tsv['normalised'])} %; the best is {best} with "
        f"{percent(merges[best][most]['normalised'])} %. α of each method is chosen on labelled validation sentences; "
        "± is the standard deviation over seeds of methods that draw; one standard error of an accuracy is about "
        f"{standard_error(tsv['accuracy'], answers)} points."
    )
    yield quality(results)
    yield ablation(results)
    yield _picture(rows, sizes)
    if results.get("alpha_sweep"):
        yield _sweep(results["alpha_sweep"])
    if results.get("interference"):
        yield from _interference(sorted(results["interference"], key=lambda row: int(row["tasks"])))
    if results.get("layers"):
        yield from _layers(results["layers"])
    yield _tasks(rows, most, results["subsets"][str(most)])


def quality(results: Mapping[str, Any], ablations: bool = False) -> Table:
    """Accuracy and normalised accuracy of every method for each number of tasks."""
    rows = _by_method(results)
    sizes = sorted({row["tasks"] for row in results["rows"]})
    shown = {name: row for name, row in rows.items() if name.startswith(ABLATION) == ablations or name == "TSV-M"}
    best = {
        size: max(row[size]["normalised"] for name, row in shown.items() if size in row and name not in REFERENCES)
        for size in sizes
    }
    cells = []
    for name, row in shown.items():
        line = [name]
        for size in sizes:
            found = row.get(size)
            if found is None:
                line += ["–", "–", "–"]
                continue
            normal = percent(found["normalised"]) + (f" ± {percent(found['spread'])}" if "spread" in found else "")
            if name not in REFERENCES and found["normalised"] == best[size]:
                normal = f"**{normal}**"
            alpha = "–" if found["alpha"] is None else f"{found['alpha']:g}"
            line += [percent(found["accuracy"]), normal, alpha]
        cells.append(line)
    columns = ["", *(f"{size} tasks{what}" for size in sizes for what in (", accuracy", ", normalised", ", α"))]
    return Table(columns, cells, "The ablation of TSV-M" if ablations else "Accuracy and normalised accuracy, %")


def brief(results: Mapping[str, Any]) -> Table:
    """Normalised accuracy alone, of merges and of what they stand between."""
    rows = {name: row for name, row in _by_method(results).items() if not name.startswith(ABLATION)}
    sizes = sorted({row["tasks"] for row in results["rows"]})
    best = {
        size: max(row[size]["normalised"] for name, row in rows.items() if size in row and name not in REFERENCES)
        for size in sizes
    }
    cells = []
    for name, row in rows.items():
        shown = [percent(row[size]["normalised"]) if size in row else "–" for size in sizes]
        top = [name not in REFERENCES and size in row and row[size]["normalised"] == best[size] for size in sizes]
        cells.append([name, *(f"**{cell}**" if first else cell for cell, first in zip(shown, top, strict=True))])
    return Table(["normalised accuracy, %", *(f"{size} tasks" for size in sizes)], cells)


def ablation(results: Mapping[str, Any]) -> Table:
    return quality(results, ablations=True)


def _by_method(results: Mapping[str, Any]) -> dict[str, dict[int, Any]]:
    found: dict[str, dict[int, Any]] = defaultdict(dict)
    for row in results["rows"]:
        found[row["method"]][row["tasks"]] = row
    order = ("base encoder", "weight averaging")
    first = {name: found[name] for name in order if name in found}
    last = {name: found[name] for name in ("fine-tuned experts",) if name in found}
    return {**first, **{k: v for k, v in found.items() if k not in {**first, **last}}, **last}


def _picture(rows: Mapping[str, Mapping[int, Any]], sizes: list[int]) -> Figure:
    most = sizes[-1]
    names = [n for n, row in rows.items() if most in row and n != "fine-tuned experts" and not n.startswith(ABLATION)]
    names.sort(key=lambda name: rows[name][most]["normalised"])
    bars = Bars(
        names,
        {f"{size} tasks": [rows[n][size]["normalised"] if size in rows[n] else None for n in names] for size in sizes},
        Axis("normalised accuracy", percent=True),
        dots=True,
    )
    return Figure("multi_task", f"Normalised accuracy of merges of {most} MiniLM experts by method", [bars])


def _sweep(sweep: list[Mapping[str, Any]]) -> Figure:
    lines: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for point in sweep:
        if not point["method"].startswith(ABLATION):
            lines[point["method"]].append((point["alpha"], point["accuracy"]))
    groups: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    for name, points in lines.items():
        groups[max(alpha for alpha, _ in points) > 1][name] = sorted(points)
    titles = ("sums of task vectors", "means and spectral merges")
    axes = Axis("α"), Axis("validation accuracy", percent=True)
    panels = [Lines(group, *axes, title) for group, title in zip(groups, titles, strict=True) if group]
    return Figure("multi_task_alpha", "Validation accuracy by scaling coefficient", panels)


def _interference(rows: list[Mapping[str, Any]]) -> Iterator[Part]:
    cells = [[str(r["tasks"]), r["method"], f"{r['sti']:.3g}", percent(r["normalised"])] for r in rows]
    yield Table(["tasks", "", "total STI", "normalised, %"], cells, "Singular task interference beside accuracy")
    names = list(dict.fromkeys(row["method"] for row in rows))
    points = {name: [(r["sti"], r["normalised"]) for r in rows if r["method"] == name] for name in names}
    # A point at zero has no place on a logarithmic axis.
    shown = {name: [(max(x, 1e-12), y) for x, y in each] for name, each in points.items()}
    axes = Axis("total STI", log=True), Axis("normalised accuracy", percent=True)
    yield Figure(
        "multi_task_interference", "Normalised accuracy against interference", [Lines(shown, *axes, scatter=True)]
    )


def _layers(rows: list[Mapping[str, Any]]) -> Iterator[Part]:
    blocks = list(dict.fromkeys(row["block"] for row in rows))
    keys = ("sti", "sti_after", "normalised_sti", "chance", "procrustes_left", "procrustes_right")
    means = {b: {k: _mean([row[k] for row in rows if row["block"] == b]) for k in keys} for b in blocks}
    after = max(row["sti_after"] for row in rows)
    yield Text(
        "Interference of the truncated singular vectors of all experts, mean over the matrices of each block; "
        f"TSV-M leaves at most {after:.1e} of it. Procrustes errors say how far the vectors move to become orthogonal."
    )
    cells = [
        [
            block,
            f"{mean['sti']:.3g}",
            f"{mean['sti_after']:.1e}",
            f"{mean['normalised_sti']:.3f}",
            f"{mean['chance']:.3f}",
            f"{mean['procrustes_left']:.3f}",
            f"{mean['procrustes_right']:.3f}",
        ]
        for block, mean in means.items()
    ]
    columns = ["block", "STI", "after TSV-M", "normalised STI", "by chance", "Procrustes, left", "Procrustes, right"]
    yield Table(columns, cells, "Interference by block")
    sides = {"normalised STI": "normalised_sti", "by chance": "chance"}
    errors = {"truncated, left": "procrustes_left", "truncated, right": "procrustes_right", "whole": "procrustes_full"}

    def line(key: str) -> list[tuple[float, float]]:
        known = {b: [row[key] for row in rows if row["block"] == b and row.get(key) is not None] for b in blocks}
        return [(n, _mean(values)) for n, values in enumerate(known.values()) if values]

    panels = [
        Lines({label: line(key) for label, key in series.items()}, Axis("block", whole=True), Axis(title))
        for series, title in ((sides, "normalised STI"), (errors, "Procrustes error"))
    ]
    yield Figure("multi_task_layers", "Interference and Procrustes error by block", panels)


def _tasks(rows: Mapping[str, Mapping[int, Any]], size: int, tasks: list[str]) -> Table:
    cells = [
        [name, *(percent(row[size]["per_task"][task]) for task in tasks)]
        for name, row in rows.items()
        if size in row and not name.startswith(ABLATION)
    ]
    return Table(["", *tasks], cells, f"Accuracy on each of {size} tasks, %")


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
