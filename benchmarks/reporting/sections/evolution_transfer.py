"""Negative transfer of winners, plain merges and endpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.reporting.formats import percent
from benchmarks.reporting.parts import Part, Table, Text

#: Fitness whose winners are shown, besides full evaluation; the middle number of items.
SHOWN = ("mean", "gmp-irt, irt")


def transfer(results: Mapping[str, Any]) -> Iterator[Part]:
    found = results["transfer"]
    best = found["best_endpoint"]
    kind = list(found["winners"])[-1]
    winners = found["winners"][kind]
    sizes = list(results["estimates"]["mae"])
    shown = ["full", *(f"{name} {sizes[len(sizes) // 2]}" for name in SHOWN)]
    search = results[kind]
    yield Text(
        "Negative transfer, as the thesis defines it, is the share of items that the merge gets wrong among those that "
        f"at least one endpoint gets right ({found['known']} of {found['items']} items). Winners are those of "
        f"{search['generations']} generations of {search['population']}, on their unseen items, all seeds together; "
        "the others are on all items. The table also shows the same share for the items that the best endpoint, "
        f"{best}, gets right, and the gain: the share of items that the merge gets right among those that no endpoint "
        "does. An endpoint has a rate too, because it lacks what only others know: this is the cost of not merging. "
        "Standard errors treat items as drawn at random."
    )
    rows = {f"winner, {name}": winners[name] for name in shown}
    rows |= {f"all weights {weight}": row for weight, row in found["equal_weights"].items()}
    rows |= {f"mean of {found['grid']['merges']} merges": found["grid"]}
    rows |= {f"endpoint {name}": row for name, row in found["endpoints"].items()}
    cells = [
        [
            name,
            *(_rate(rate, own=True) for rate in row["tasks"].values()),
            _rate(row["all"]),
            str(row["all"]["items"]),
            "–" if name == f"endpoint {best}" else _rate(row["best_endpoint"]),
            "–" if name.startswith("endpoint ") else _rate(row["gained"]),
        ]
        for name, row in rows.items()
    ]
    columns = ["model", *found["endpoints"], "all", "n", f"of what {best} knows", "gained"]
    caption = "Negative transfer in %, ± standard error where answers differ (items of the task); n items in all"
    yield Table(columns, cells, caption)
    yield Text(_compared(winners["full"]["all"], found))


def _rate(rate: Mapping[str, float], own: bool = False) -> str:
    if not rate["items"]:
        return "–"
    around = f" ± {percent(rate['error'])}" if rate["error"] else ""
    return f"{percent(rate['rate'])}{around}" + (f" ({rate['items']})" if own else "")


def _compared(winner: Mapping[str, float], found: Mapping[str, Any]) -> str:
    """Full evaluation's winner against every merge with equal weights and the best endpoint."""
    others = {f"the merge with all weights {weight}": row["all"] for weight, row in found["equal_weights"].items()}
    others[f"the best endpoint, {found['best_endpoint']}"] = found["endpoints"][found["best_endpoint"]]["all"]
    said = []
    for name, row in others.items():
        error = (winner["error"] ** 2 + row["error"] ** 2) ** 0.5
        difference = row["rate"] - winner["rate"]
        verdict = (
            "clearly more" if difference > 2 * error else "clearly less" if difference < -2 * error else "no clear"
        )
        said.append(f"{percent(row['rate'])} % of {name} ({verdict}{' difference' * (verdict == 'no clear')})")
    return (
        f"Full evaluation's winner forgets {percent(winner['rate'])} ± {percent(winner['error'])} % of what some "
        f"endpoint knows, against {', '.join(said)}; a difference is clear beyond two standard errors."
    )
