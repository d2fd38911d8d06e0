"""Experts of several tasks in one encoder: every static method, the ablation of TSV-Merge, interference by layer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.reporting.formats import error_of, percent
from benchmarks.reporting.parts import Axis, Bars, Figure, Lines, Part, Table, Text

#: Rows that are not merges, and those that have their own table.
REFERENCES = ("base encoder", "fine-tuned experts")
ABLATION = "TSV-M without"


def parts(results: Mapping[str, Any]) -> Iterator[Part]:
    rows = _by_method(results)
    sizes = sorted({row["tasks"] for row in results["rows"]})
    most = sizes[-1]
    merges = {name: row for name, row in rows.items() if name not in REFERENCES and most in row}
    counts = {key: _counts(results, key) for key in ("test", "validation")}
    kept = {name: percent(rows[name][most]["normalised"]) for name in ("base encoder", "weight averaging", "TSV-M")}
    yield Text(
        f"MiniLM experts of {most} tasks ({', '.join(results['subsets'][str(most)])}) merged into one encoder; each "
        f"task is answered through its own head, on {counts['test']} test sentences. The base encoder under these "
        f"heads already keeps {kept['base encoder']} % of the experts' accuracy, averaging "
        f"{kept['weight averaging']} %, TSV-M {kept['TSV-M']} %; {_best(results, merges, most)} α of each method is "
        f"chosen on {counts['validation']} labelled validation sentences a task. ± is the standard deviation over the "
        "seeds of methods that draw."
    )
    yield quality(results)
    yield ablation(results)
    yield _picture(rows, sizes)
    if results.get("alpha_sweep"):
        yield _sweep(results["alpha_sweep"])
    if results.get("interference"):
        yield from _interference(sorted(results["interference"], key=lambda row: int(row["tasks"])))
    if results.get("layers"):
        yield from _layers(results["layers"], most)
    yield _tasks(rows, most, results["subsets"][str(most)])


def _counts(results: Mapping[str, Any], key: str) -> str:
    found = sorted({task[key] for task in results["sentences"].values()})
    return str(found[0]) if len(found) == 1 else f"{found[0]} to {found[-1]}"


def error(results: Mapping[str, Any], size: int) -> float:
    """One standard error of a normalised accuracy near that of TSV-M."""
    rows = _by_method(results)
    answers = sum(results["sentences"][task]["test"] for task in results["subsets"][str(size)])
    return error_of(rows["TSV-M"][size]["accuracy"], answers) / rows["fine-tuned experts"][size]["accuracy"]


def errors(results: Mapping[str, Any]) -> str:
    sizes = sorted({row["tasks"] for row in results["rows"]})
    each = ", ".join(f"{percent(error(results, size))} for {size} tasks" for size in sizes)
    return f"bold: within one standard error of the best ({each})"


def _best(results: Mapping[str, Any], merges: Mapping[str, Mapping[int, Any]], size: int) -> str:
    ranked = sorted(merges, key=lambda name: merges[name][size]["normalised"], reverse=True)
    top = merges[ranked[0]][size]["normalised"]
    near = [name for name in ranked[1:] if merges[name][size]["normalised"] >= top - error(results, size)]
    within = f", with {len(near)} others within one standard error" if near else ""
    return f"the highest is {ranked[0]} with {percent(top)} %{within}."


def _leading(results: Mapping[str, Any], rows: Mapping[str, Mapping[int, Any]]) -> dict[int, float]:
    """For each number of tasks the accuracy that is within one standard error of the best merge."""
    merges = [row for name, row in rows.items() if name not in REFERENCES]
    sizes = sorted({size for row in merges for size in row})
    return {s: max(row[s]["normalised"] for row in merges if s in row) - error(results, s) for s in sizes}


def quality(results: Mapping[str, Any]) -> Table:
    """Accuracy and normalised accuracy of every method for each number of tasks."""
    rows = {name: row for name, row in _by_method(results).items() if not name.startswith(ABLATION)}
    return _full(results, rows, f"Accuracy and normalised accuracy, %; {errors(results)}")


def ablation(results: Mapping[str, Any]) -> Table:
    """Low rank and orthogonal, either, neither: the sum of the task vectors as they are."""
    names = {
        "low rank and orthogonal (TSV-M)": "TSV-M",
        "low rank alone": "TSV-M without orthogonalisation",
        "orthogonal alone": "TSV-M without low rank",
        "neither (task arithmetic)": "task arithmetic",
    }
    rows = _by_method(results)
    return _full(results, {label: rows[name] for label, name in names.items()}, "The ablation of TSV-M")


def _full(results: Mapping[str, Any], rows: Mapping[str, Mapping[int, Any]], caption: str) -> Table:
    sizes = sorted({row["tasks"] for row in results["rows"]})
    leading = _leading(results, rows)
    cells = []
    for name, row in rows.items():
        line = [name]
        for size in sizes:
            found = row.get(size)
            if found is None:
                line += ["–", "–", "–"]
                continue
            normal = percent(found["normalised"]) + (f" ± {percent(found['spread'])}" if "spread" in found else "")
            if name not in REFERENCES and found["normalised"] >= leading[size]:
                normal = f"**{normal}**"
            alpha = "–" if found["alpha"] is None else f"{found['alpha']:g}"
            line += [percent(found["accuracy"]), normal, alpha]
        cells.append(line)
    columns = ["", *(f"{size} tasks{what}" for size in sizes for what in (", accuracy", ", normalised", ", α"))]
    return Table(columns, cells, caption)


def brief(results: Mapping[str, Any]) -> Table:
    """Normalised accuracy alone, of merges and of what they stand between."""
    rows = {name: row for name, row in _by_method(results).items() if not name.startswith(ABLATION)}
    sizes = sorted({row["tasks"] for row in results["rows"]})
    leading = _leading(results, rows)
    cells = []
    for name, row in rows.items():
        shown = [percent(row[size]["normalised"]) if size in row else "–" for size in sizes]
        top = [name not in REFERENCES and s in row and row[s]["normalised"] >= leading[s] for s in sizes]
        cells.append([name, *(f"**{cell}**" if first else cell for cell, first in zip(shown, top, strict=True))])
    return Table(["normalised accuracy, %", *(f"{size} tasks" for size in sizes)], cells)


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
    counts = f"{', '.join(map(str, sizes[:-1]))} and {most}" if sizes[:-1] else str(most)
    return Figure("multi_task", f"Normalised accuracy of merges of {counts} MiniLM experts by method", [bars])


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
    yield Text(
        "Singular task interference, STI = ‖(UᵀU − I) Σ (VᵀV − I)‖₁ of the experts' truncated singular vectors side by "
        "side, summed over matrices: 0 where no two experts share a direction. Sums that are not orthogonalised have "
        "the same one, whether truncated or not."
    )
    yield Table(["tasks", "", "total STI", "normalised, %"], cells, "Singular task interference beside accuracy")
    names = list(dict.fromkeys(row["method"] for row in rows))
    points = {name: [(r["sti"], r["normalised"]) for r in rows if r["method"] == name] for name in names}
    # A point at zero has no place on a logarithmic axis.
    shown = {name: [(max(x, 1e-12), y) for x, y in each] for name, each in points.items()}
    axes = Axis("total STI (less than 1e-12 drawn there)", log=True), Axis("normalised accuracy", percent=True)
    yield Figure(
        "multi_task_interference", "Normalised accuracy against interference", [Lines(shown, *axes, scatter=True)]
    )


def _layers(matrices: list[Mapping[str, Any]], tasks: int) -> Iterator[Part]:
    rows = [_absolute(matrix, tasks) for matrix in matrices]
    blocks = list(dict.fromkeys(row["block"] for row in rows))
    keys = ("sti", "sti_after", "normalised_sti", "chance", "procrustes_left", "procrustes_right")
    means = {b: {k: _mean([row[k] for row in rows if row["block"] == b]) for k in keys} for b in blocks}
    after = max(row["sti_after"] for row in rows)
    whole = [row for row in rows if row["procrustes_full"] is not None]
    less = all(max(row["procrustes_left"], row["procrustes_right"]) <= row["procrustes_full"] for row in whole)
    yield Text(
        "Interference of the truncated singular vectors of all experts, mean over the matrices of each block; "
        f"TSV-M leaves an STI of at most {after:.1e} in a matrix. Procrustes errors ‖U − U⊥‖ say how far the vectors "
        f"move to become orthogonal{': less if truncated first, as the thesis proves' if whole and less else ''}."
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


def _absolute(matrix: Mapping[str, Any], tasks: int) -> dict[str, Any]:
    """The matrix with ‖U − U⊥‖ for the stored ‖U − U⊥‖/‖U‖; U has one unit column a direction and task."""
    columns = {"left": matrix["rank"], "right": matrix["rank"], "full": min(matrix["shape"])}
    keys = {f"procrustes_{side}": (tasks * count) ** 0.5 for side, count in columns.items()}
    return {**matrix, **{key: matrix[key] * norm for key, norm in keys.items() if matrix[key] is not None}}


def _tasks(rows: Mapping[str, Mapping[int, Any]], size: int, tasks: list[str]) -> Table:
    cells = [
        [name, *(percent(row[size]["per_task"][task]) for task in tasks)]
        for name, row in rows.items()
        if size in row and not name.startswith(ABLATION)
    ]
    return Table(["", *tasks], cells, f"Accuracy on each of {size} tasks, %")


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
