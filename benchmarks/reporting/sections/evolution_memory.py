"""Memory of a study's workers, and what asking candidates in fewer bits changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.reporting.formats import percent
from benchmarks.reporting.parts import Part, Table, Text

MIB = 2**20


def parts(results: Mapping[str, Any]) -> Iterator[Part]:
    memory = results["memory"]
    one, *more = memory
    yield Text(
        f"Workers hold stories15M and its fine-tunes for {' and '.join(results['skills'])}, "
        f"{one['files'] / MIB:.0f} MiB in files, as memory maps, and each worker has a network of its own. Memory is "
        "the kernel's proportional set size: a page that several processes share counts once in their sum."
    )
    cells = [
        [str(row["workers"]), *(f"{row[key] / MIB:.0f}" for key in ("resident", "endpoints", "private"))]
        for row in memory
    ]
    columns = ["workers", "models, as if not shared", "models", "private memory"]
    yield Table(columns, cells, "MiB of a study's process and its workers")
    for row in more:
        copies, private = row["endpoints"] / row["files"], row["private"] / one["private"]
        yield Text(
            f"{row['workers']} workers, each of which maps the models, hold {copies:.2f} copies of them in all; pages "
            f"that other processes map too count in part. Private memory, {private:.2f} times that of one worker, is "
            "the network of each and what Python and torch need."
        )
    precision = results["precision"]
    rows = [
        [form, label, percent(each["full"]), percent(each["score"]), _points(each["bias"]), percent(each["changed"])]
        for form, found in precision["forms"].items()
        for label, each in found.items()
    ]
    told = [
        f"{form} {label}"
        for form, found in precision["forms"].items()
        for label, each in found.items()
        if each["bias"]["low"] > 0 or each["bias"]["high"] < 0
    ]
    seconds = precision["seconds"]
    times = [f"{form} takes {seconds[form] / seconds['full']:.1f}" for form in precision["forms"]]
    yield Text(
        f"The same {precision['items']} held-out items are asked in full precision, in int8 and in nf4 (bitsandbytes "
        f"on the processor). The items can tell a bias of: {', '.join(told) or 'none of them'}. Of processor seconds, "
        f"{', '.join(times)} times as many as full precision."
    )
    columns = ["form", "model", "full precision, %", "quantised, %", "bias, points (95 %)", "answers that changed, %"]
    yield Table(columns, rows, "Mean of both skills on held-out items")


def _points(bias: Mapping[str, float]) -> str:
    return f"{percent(bias['value'])} ({percent(bias['low'])} to {percent(bias['high'])})"
