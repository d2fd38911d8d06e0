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
    coarse = " This error is so large that being within it says little." if error > COARSE else ""
    yield Text(
        f"The winners of searches are scored on the {unseen['items']} of {results['items']} items that their search "
        f"never saw, with a different draw for each of {len(first['seeds'])} seeds ({unseen['covered']} items in all). "
        "Scores are mean ± standard deviation over seeds. *Lost* is the difference to the winner of full evaluation on "
        "the same unseen items, ± the standard error of its mean over seeds. *One error* is the bootstrap standard "
        f"error of the full winner's score over all {results['items']} items, up to {percent(error)} points; over the "
        f"unseen items alone it would be {percent(alone)}.{coarse} For orientation, on all items the best of "
        f"{grid['size']} merges has {percent(grid['best'])} %, their mean {percent(grid['mean'])} %, the best "
        f"endpoint, {best}, {percent(first['endpoints'][best])} %, and the base {percent(first['base'])} %."
    )
    for search in searches:
        yield _fitness(search)
    yield Text(" ".join(_against_endpoint(search) for search in searches))
    yield Figure(f"{record}_winners", "Score of the winner against questions asked", [_reached(s) for s in searches])
    yield Text(
        "The figure shows scores on unseen items relative to the winner of full evaluation on the same items. "
        "Questions include calibration, bars are standard errors over seeds, and points of different fitness are "
        f"shifted sideways by {100 * (APART - 1):.0f} % each."
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
        "fewer per candidate",
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
        f"With {_size(search)}, the winner of full evaluation is {percent(alone['loss'])} ± "
        f"{percent(alone['loss_error'])} points better than the best endpoint on unseen items. Of {len(few)} searches "
        f"with few questions, {better} beat the best endpoint on average."
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
