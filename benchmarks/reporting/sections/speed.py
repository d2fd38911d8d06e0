"""Time and memory of merges, against the limit of the machine and against mergekit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.reporting.formats import mebibytes, seconds
from benchmarks.reporting.parts import Axis, Bars, Figure, Part, Table, Text

LIMIT = "a compiled program that does the same reading, arithmetic and writing and nothing else"


def table(measured: Mapping[str, Any]) -> Table:
    rows = []
    for method, row in measured["methods"].items():
        ours, peer = row["ours"], row.get("mergekit")
        cells = [
            f"`{method}`",
            f"{ours['seconds']:.1f}",
            f"{ours['cpu_seconds']:.1f}",
            f"{row['ratio_to_limit']:.1f}" if "ratio_to_limit" in row else "–",
            f"{row['cpu_ratio_to_limit']:.1f}" if "cpu_ratio_to_limit" in row else "–",
            mebibytes(ours["peak_anonymous"]),
        ]
        if peer:
            faster = f"**{row['times_faster']:.1f}×**"
            cells += [f"{peer['seconds']:.0f}", faster, mebibytes(peer["peak_anonymous"])]
        rows.append(cells + ["–"] * (9 - len(cells)))
    columns = ["method", "seconds", "processor seconds", "× limit", "× limit, processor", "peak memory"]
    return Table([*columns, "mergekit, seconds", "times faster", "mergekit, peak memory"], rows)


def figure(measured: Mapping[str, Any]) -> Figure:
    """Seconds of every method: the limit, ours, mergekit's."""
    rows = {name: row for name, row in measured["methods"].items() if "mergekit" in row}
    sides = {"limit": "limit", "merganser": "ours", "mergekit": "mergekit"}
    bars = Bars(
        list(rows),
        {label: [row[key]["seconds"] for row in rows.values()] for label, key in sides.items()},
        Axis(f"seconds, {measured['params']} parameters in bfloat16, 2 cores"),
    )
    return Figure("merge_speed", f"Seconds to merge {measured['params']}-parameter models by method", [bars])


def conditions(measured: Mapping[str, Any]) -> str:
    """What was merged and what the columns compare with."""
    return (
        f"A base and three models of {measured['params']} parameters in bfloat16 (`linear` takes the three models, "
        "`nuslerp` the base and two, `slerp` and `arcee_fusion` the base and one), warm cache, everything synced. The "
        f"limit is {LIMIT}, with two threads; the ratios to it leave out the {measured['start_up']:.1f} s in which "
        "Python and torch start. It is not tight where a ratio is below one. Ours and the limit are medians of the "
        "runs that the command says, mergekit ran once."
    )


def parts(results: Mapping[str, Any]) -> Iterator[Part]:
    yield Text(conditions(results))
    yield table(results)
    yield figure(results)
    if small := results.get("small_tensors"):
        yield Text(
            f"Ten thousand small tensors take {small['seconds']:.1f} s in {mebibytes(small['peak_anonymous'])}; "
            f"`merganser --help` takes {results['help_cpu_seconds']:.2f} s of processor."
        )


def task_vectors(results: Mapping[str, Any]) -> Iterator[Part]:
    yield Text(
        f"Expressions over task vectors of {results['params']}-parameter checkpoints: as a recipe, in Python, and the "
        "geometry (norms and cosines), which only reads. Limits are a plain copy and a plain read; the ratios leave "
        f"out the {results['start_up']:.1f} s in which Python and torch start."
    )
    rows = [
        [
            name,
            seconds(side["seconds"]),
            seconds(side["cpu_seconds"]),
            mebibytes(side["peak_anonymous"]),
            f"{side['ratio_to_limit']:.2f}",
        ]
        for name, side in results["sides"].items()
    ]
    yield Table(["", "seconds", "processor seconds", "peak memory", "× limit"], rows)


def parity(results: Mapping[str, Any]) -> Iterator[Part]:
    equal = sum(gap["of_weight"] <= 1e-5 for gap in results.values())
    yield Text(
        f"The same recipes run by mergekit and by merganser: {equal} of {len(results)} give the same weights up to "
        "rounding. Where they differ, [the page on parity](../parity.md) says why."
    )
    yield parity_table(results)


def parity_table(results: Mapping[str, Any]) -> Table:
    rows = [
        [
            case,
            f"{gap['of_weight']:.1e}",
            f"{gap['of_change']:.1e}",
            "equal" if gap["of_weight"] <= 1e-5 else "differs",
        ]
        for case, gap in results.items()
    ]
    return Table(["recipe", "of the largest weight", "of the largest change", ""], rows)


def dialect(results: Mapping[str, Any]) -> Iterator[Part]:
    cases = [case for found in results.values() for case in found.values()]
    counts = {verdict: sum(case["verdict"] == verdict for case in cases) for verdict in ("same", "noted", "silent")}
    yield Text(
        "Every method of mergekit with every parameter, and what recipes may leave out or spell otherwise: of "
        f"{len(cases)} recipes in its dialect, {counts['same']} mean the same in both programs (equal weights, or "
        f"refused by both), {counts['noted']} something else with a note in the plan, {counts['silent']} without one."
    )
    yield dialect_table(results)


def dialect_table(results: Mapping[str, Any]) -> Table:
    rows = []
    for method, cases in results.items():
        verdicts = [case["verdict"] for case in cases.values()]
        others = [name for name, case in cases.items() if case["verdict"] != "same"]
        counted = [str(verdicts.count(verdict)) for verdict in ("same", "noted", "silent")]
        rows.append([f"`{method}`", *counted, ", ".join(others)])
    return Table(["method", "same", "noted", "silent", "not the same"], rows)
