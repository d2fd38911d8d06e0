"""Networks of one task trained apart: plain mean, matching, and the universe, with and without REPAIR."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from benchmarks.reporting.formats import number, percent
from benchmarks.reporting.parts import Axis, Figure, Lines, Part, Table, Text


def section(network: str) -> Any:
    return partial(parts, network)


def parts(network: str, results: Mapping[str, Any]) -> Iterator[Part]:
    counts = sorted(int(key) for key in results if key.isdigit())
    tables = {n: results[str(n)] for n in counts}
    single = results["single"]
    mean = sum(single) / len(single)
    last = tables[counts[-1]]
    ways = list(last)
    plain, best = ways[0], max(ways, key=lambda way: last[way]["repaired_accuracy"])
    ours = next((way for way in ways if way.startswith("C²M³")), ways[-1])
    reached = last[ours]["repaired_accuracy"]
    images = results["settings"]["test_images"]
    # A standard error: less is no lead.
    ahead = last[best]["repaired_accuracy"] - reached > (reached * (1 - reached) / images) ** 0.5
    yield Text(
        f"{len(single)} networks trained from different seeds reach {percent(mean)} % of the test set each. The plain "
        f"mean of {counts[-1]} of them reaches {percent(last[plain]['accuracy'])} %, "
        f"{percent(last[plain]['repaired_accuracy'])} % after REPAIR; in the universe of C²M³ the mean reaches "
        f"{percent(last[ours]['accuracy'])} % and {percent(last[ours]['repaired_accuracy'])} %."
        + (f" Here {best} is ahead with {percent(last[best]['repaired_accuracy'])} %." if ahead else "")
    )
    yield _accuracies(tables, ways, "accuracy", "Accuracy of the merge, %")
    yield _accuracies(tables, ways, "repaired_accuracy", "Accuracy after REPAIR, %")
    if any(row["cycle_error"] for table in tables.values() for row in table.values()):
        yield _cycles(tables, ways)
    if len(counts) < 2:
        return
    matched = [way for way in ways if way != plain]
    panels = [
        Lines(
            {way: [(n, tables[n][way][key]) for n in counts] for way in shown},
            Axis("networks", whole=True),
            Axis("accuracy", percent=True),
            title,
            levels={"single networks": mean},
        )
        for key, shown, title in (
            ("accuracy", ways, "as merged"),
            ("accuracy", matched, "without the plain mean"),
            ("repaired_accuracy", matched, "the same after REPAIR"),
        )
    ]
    yield Figure(f"single_task_{network}", f"Accuracy of merges of {network} networks trained apart", panels)


def _cycles(tables: Mapping[int, Any], ways: list[str]) -> Table:
    rows = [[way, *(number(table[way]["cycle_error"]) for table in tables.values())] for way in ways]
    return Table(["cycle error", *(f"n = {n}" for n in tables)], rows, "How far permutations are from composing")


def _accuracies(tables: Mapping[int, Any], ways: list[str], key: str, caption: str) -> Table:
    rows = []
    for way in ways:
        cells = []
        for table in tables.values():
            best = max(each[key] for each in table.values())
            cell = percent(table[way][key])
            around = table[way].get("spread" if key == "accuracy" else "repaired_spread")
            if around is not None:
                cell += f" ± {percent(around)}"
            cells.append(f"**{cell}**" if table[way][key] == best else cell)
        rows.append([way, *cells])
    return Table(["", *(f"n = {n}" for n in tables)], rows, caption)
