"""Alternating tuning and merging against task arithmetic, and the paths of the experts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from statistics import mean, stdev
from typing import Any

from benchmarks.reporting.formats import percent
from benchmarks.reporting.parts import Axis, Figure, Lines, Part, Table, Text

PLAIN = "task arithmetic"


def parts(results: Mapping[str, Any]) -> Iterator[Part]:
    rows = {row["method"]: row for row in results["rows"]}
    plain, best = rows[PLAIN]["accuracies"], max(_rounds(rows), key=lambda name: mean(rows[name]["accuracies"]))
    gains = [a - b for a, b in zip(rows[best]["accuracies"], plain, strict=True)]
    cosines = results["cosines"]
    yield Text(
        "A small network learns four views of handwritten digits, each for ten epochs. Task arithmetic merges the ends "
        "of the four runs, with α chosen on held-out images; ATM merges by the mean after every round and continues "
        "from there. All have the same number of updates for each task; PA-ATM draws them from the held-out images "
        f"alone. {best} is {100 * mean(gains):.1f} ± {100 * error(gains):.1f} points ahead of task arithmetic (paired, "
        "one standard error): short rounds keep task vectors close to gradients."
    )
    cells = [
        [
            name,
            percent(mean(row["accuracies"])),
            "–" if len(plain) < 2 else percent(error(row["accuracies"])),
            ", ".join(f"{alpha:g}" for alpha in row["alphas"]) or "–",
        ]
        for name, row in rows.items()
    ]
    yield Table(["method", "accuracy, %", "± one standard error", "α by seed"], cells, f"Means over {len(plain)} seeds")
    yield Text(
        f"Over the epochs of a run, the task vector turns away from that of the first epoch: cos(τ₁, τₖ) falls to "
        f"{cosines[-1]:.2f} after {len(cosines)}. The first epoch is {percent(results['first_share'])} % of the "
        "length of the path."
    )
    plane = results["plane"]
    series = {name: [(x, y) for x, y in points] for name, points in plane["points"].items()}
    explained = [percent(share, 0) for share in plane["explained"]]
    turning = [(epoch + 1, cosine) for epoch, cosine in enumerate(cosines)]
    yield Figure(
        "atm",
        "Paths of experts, ATM and joint training in one plane, and how far task vectors turn",
        [
            Lines(
                series,
                Axis(f"first axis ({explained[0]} % of the variance)"),
                Axis(f"second axis ({explained[1]} %)"),
                "paths from the base, epoch by epoch",
            ),
            Lines({"cos(τ₁, τₖ)": turning}, Axis("epoch k", whole=True), Axis("cosine"), "turning of task vectors"),
        ],
    )


def _rounds(rows: Mapping[str, Any]) -> list[str]:
    return [name for name in rows if name.startswith("ATM")]


def error(values: list[float]) -> float:
    """The standard error of a mean over seeds; nothing is known of one alone."""
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
