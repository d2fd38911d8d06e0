"""What searches find, on items they never saw, against the questions they asked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.reporting.formats import percent, spread
from benchmarks.reporting.parts import Axis, Figure, Lines, Part, Table, Text

#: Above this "within one error" tells little.
COARSE = 0.05
#: Points of different fitness are set apart by this factor on the axis of questions.
APART = 1.06


def winners(record: str, results: Mapping[str, Any]) -> Iterator[Part]:
    searches = [results[name] for name in ("winners", "larger") if name in results]
    first = searches[0]
    unseen, grid, best = first["unseen"], first["grid"], _best(first)
    full = [search["fitness"]["full"] for search in searches]
    error, alone = (max(row[name] for row in full) for name in ("bootstrap_error", "unseen_error"))
    coarse = " So coarse an error excuses much: to be within it says little." if error > COARSE else ""
    yield Text(
        f"Winners of searches, scored on the {unseen['items']} of {results['items']} items that their search never "
        f"saw: another draw for each of {len(first['seeds'])} seeds, {unseen['covered']} items in all; mean ± standard "
        "deviation over seeds. Lost is the difference to full evaluation's winner on the same unseen items, ± the "
        "standard error of its mean over seeds. One error is the bootstrap standard error of the full winner's "
        f"score over all {results['items']} items, up to {percent(error)} points; over the unseen items alone it would "
        f"be {percent(alone)}.{coarse} For orientation, on all items: the best of {grid['size']} merges has "
        f"{percent(grid['best'])} %, their mean {percent(grid['mean'])} %, the best endpoint, {best}, "
        f"{percent(first['endpoints'][best])} %, the base {percent(first['base'])} %."
    )
    for search in searches:
        yield _fitness(search)
    yield Text(" ".join(_against_endpoint(search) for search in searches))
    yield Figure(f"{record}_winners", "Score of the winner against questions asked", [_reached(s) for s in searches])
    yield Text(
        "Scores on unseen items against full evaluation's winner on the same items; questions count calibration; bars "
        "are standard errors over seeds; points of different fitness are set apart sideways by "
        f"{100 * (APART - 1):.0f} % each."
    )


def _best(search: Mapping[str, Any]) -> str:
    return max(search["endpoints"], key=lambda name: search["endpoints"][name])


def _lost(row: Mapping[str, float]) -> str:
    return f"{percent(row['loss'])} ± {percent(row['loss_error'])}"


def _fitness(search: Mapping[str, Any]) -> Table:
    one = search["fitness"]["full"]["bootstrap_error"]
    rows = [
        [
            name,
            spread([run["test"] for run in row["runs"]]),
            "–" if name == "full" else _lost(row),
            "–" if name == "full" else "yes" if row["within_one_error"] else "no",
            f"{row['asked'] + row['calibration']:.0f}",
            f"{row['saved_per_candidate']:.1f}×",
            f"{row['saved']:.1f}×",
        ]
        for name, row in search["fitness"].items()
    ]
    best = _best(search)
    for label, name in ((f"no search: {best}", best), ("no search: base", "base")):
        row = search["unseen"]["models"][name]
        within = "yes" if row["loss"] <= one else "no"
        rows.append([label, spread(row["runs"]), _lost(row), within, "–", "–", "–"])
    columns = [
        "fitness",
        "on unseen items",
        "lost",
        "within one error",
        "questions",
        "fewer a candidate",
        "fewer in all",
    ]
    caption = (
        f"Scores in %, {_size(search)}; n = {len(search['seeds'])} seeds of {search['unseen']['items']} unseen items; "
        f"one error is {percent(one)} points; questions and fewer in all count calibration"
    )
    return Table(columns, rows, caption)


def _against_endpoint(search: Mapping[str, Any]) -> str:
    """Whether searching pays at all: full evaluation's winner and the others against the best endpoint."""
    alone = search["unseen"]["models"][_best(search)]
    few = {name: row for name, row in search["fitness"].items() if name != "full"}
    better = sum(row["loss"] < alone["loss"] for row in few.values())
    return (
        f"With {_size(search)}, full evaluation's winner is {percent(alone['loss'])} ± {percent(alone['loss_error'])} "
        f"points better than the best endpoint on unseen items; of {len(few)} searches with few questions {better} "
        "are better than it on average."
    )


def _size(search: Mapping[str, Any]) -> str:
    return f"{search['generations']} generations of {search['population']}"


def _reached(search: Mapping[str, Any]) -> Lines:
    fitness = {name: row for name, row in search["fitness"].items() if name != "full"}
    kinds = list(dict.fromkeys(name.rsplit(" ", 1)[0] for name in fitness))
    rows = {kind: [row for name, row in fitness.items() if name.rsplit(" ", 1)[0] == kind] for kind in kinds}
    points = {
        kind: [
            ((row["asked"] + row["calibration"]) * APART ** (place - len(kinds) // 2), -100 * row["loss"])
            for row in found
        ]
        for place, (kind, found) in enumerate(rows.items())
    }
    errors = {kind: [100 * row["loss_error"] for row in found] for kind, found in rows.items()}
    levels = {
        "full evaluation": 0.0,
        "best endpoint": -100 * search["unseen"]["models"][_best(search)]["loss"],
    }
    x, y = Axis("questions, calibration included", log=True), Axis("points over full evaluation")
    return Lines(points, x, y, _size(search), spread=errors, levels=levels, scatter=True)
