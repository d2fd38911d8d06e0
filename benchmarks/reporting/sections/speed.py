"""Time and memory of merges, against the limit of the machine and against mergekit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.reporting.formats import mebibytes, rounding, seconds
from benchmarks.reporting.parts import Axis, Bars, Figure, Part, Table, Text

LIMIT = "a compiled program that does only the same reading, arithmetic and writing"


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
        f"A base and three models of {measured['params']} parameters in bfloat16 (`linear` merges the three models, "
        "`nuslerp` the base and two, `slerp` and `arcee_fusion` the base and one), with a warm cache and synced "
        f"output. The limit is {LIMIT}, with two threads. The ratios to it exclude the {measured['start_up']:.1f} s of "
        "start-up. A ratio below one means that the limit is not tight. Merganser and the limit "
        "are medians over the repetitions in the command; mergekit ran once."
    )


def parts(results: Mapping[str, Any]) -> Iterator[Part]:
    yield Text(conditions(results))
    yield table(results)
    yield figure(results)
    if small := results.get("small_tensors"):
        yield Text(
            f"Ten thousand small tensors take {small['seconds']:.1f} s in {mebibytes(small['peak_anonymous'])}; "
            f"`merganser --help` takes {results['help_cpu_seconds']:.2f} s of processor time."
        )


def task_vectors(results: Mapping[str, Any]) -> Iterator[Part]:
    yield Text(
        f"Expressions over task vectors of {results['params']}-parameter checkpoints, as a recipe and in Python, and "
        "geometry (norms and cosines), which only reads. The limits are a plain copy and a plain read. The ratios "
        f"exclude the {results['start_up']:.1f} s in which Python and torch start."
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
        f"We ran the same recipes with mergekit and Merganser: {equal} of {len(results)} give the same weights up to "
        "rounding. [Coming from mergekit](../parity.md) explains the differences."
    )
    yield parity_table(results)


def parity_table(results: Mapping[str, Any]) -> Table:
    rows = [
        [
            case,
            rounding(gap["of_weight"]),
            rounding(gap["of_change"]),
            "equal" if gap["of_weight"] <= 1e-5 else "differs",
        ]
        for case, gap in results.items()
    ]
    return Table(["recipe", "of the largest weight", "of the largest change", ""], rows)


def dialect(results: Mapping[str, Any]) -> Iterator[Part]:
    cases = [case for found in results.values() for case in found.values()]
    counts = {verdict: sum(case["verdict"] == verdict for case in cases) for verdict in ("same", "noted", "silent")}
    yield Text(
        "We ran every method of mergekit with every parameter, and recipes that omit something or spell it "
        f"differently. Of {len(cases)} recipes, {counts['same']} mean the same in both programs (equal weights, or an "
        f"error in both), {counts['noted']} differ with a note in the plan, and {counts['silent']} differ without one."
    )
    yield dialect_table(results)


def dialect_table(results: Mapping[str, Any]) -> Table:
    rows = []
    for method, cases in results.items():
        verdicts = [case["verdict"] for case in cases.values()]
        others = [name for name, case in cases.items() if case["verdict"] != "same"]
        counted = [str(verdicts.count(verdict)) for verdict in ("same", "noted", "silent")]
        named = "all" if len(others) == len(cases) > 1 else ", ".join(others)
        rows.append([f"`{method}`", *counted, named])
    return Table(["method", "same", "noted", "silent", "cases that differ"], rows)
