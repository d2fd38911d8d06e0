"""The same merges by other programs: agreement, time, memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.reporting.formats import mebibytes, rounding
from benchmarks.reporting.parts import Axis, Bars, Figure, Part, Table, Text


def parts(results: Mapping[str, Any]) -> Iterator[Part]:
    rows, programs = results["rows"], results["programs"]
    versions = ", ".join(f"{name} {program['version']}" for name, program in programs.items())
    yield Text(
        f"The same MiniLM experts are merged by {versions} with the same hyper-parameters. Time and memory are those "
        "of a whole process, from its start to a synced output; the second table shows loading the program alone. Some "
        "definitions differ (scope and count of TIES, draws of DARE, shared directions of TSV-M); the docstring of "
        "`benchmarks/peers.py` says how."
    )
    cells = [
        [
            row["method"],
            row["program"],
            "–" if row.get("difference") is None else rounding(row["difference"]),
            f"{row['seconds']:.1f}",
            f"{row['cpu_seconds']:.1f}",
            mebibytes(row["peak_anonymous"]),
        ]
        for row in rows
    ]
    columns = ["method", "program", "difference", "seconds", "processor seconds"]
    yield Table([*columns, "peak memory"], cells, "Difference: of the task vector, relative to Merganser's")
    cells = [
        [name, program["version"], f"{program['seconds']:.1f}", mebibytes(program["peak_anonymous"])]
        for name, program in programs.items()
    ]
    yield Table(["program", "version", "seconds", "memory"], cells, "Loading the program alone")
    methods = list(dict.fromkeys(row["method"] for row in rows))
    found = {(row["method"], row["program"]): row for row in rows}

    def bars(key: str, label: str, scale: float = 1.0) -> Bars:
        series = {
            name: [found[m, name][key] / scale if (m, name) in found else None for m in methods] for name in programs
        }
        return Bars(methods, series, Axis(label))

    panels = [bars("seconds", "seconds"), bars("peak_anonymous", "peak memory, MiB", 2**20)]
    yield Figure("peers", "Time and memory of the same merges by several programs", panels)
