"""Scores and abilities of merges from few items."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.reporting.formats import percent
from benchmarks.reporting.parts import Axis, Figure, Lines, Part, Table, Text

#: A direction of abilities counts as told apart by the items when its singular value is this share of the largest.
TOLD = 0.01


def estimates(record: str, found: Mapping[str, Any]) -> Iterator[Part]:
    sizes = list(found["mae"])
    names = list(next(iter(found["mae"][sizes[0]].values())))
    guess = found["mae_of_the_endpoints_mean"]
    cells = [value for rows in found["mae"].values() for row in rows.values() for value in row.values()]
    beaten = sum(value < guess for value in cells)
    yield Text(
        f"The scores of {found['merges']} merges are estimated from few items, with {found['draws']} subsets of each "
        f"size. Their true scores have a standard deviation of {percent(found['score']['spread'])} points. Guessing "
        f"the mean score of the endpoints, without asking anything, is off by {percent(guess, 2)} points; {beaten} of "
        f"the {len(cells)} estimates below are closer. The rank correlation shows whether an estimate can order merges."
    )
    rows = []
    for size in sizes:
        for extractor, row in found["mae"][size].items():
            ranks = found["spearman"][size][extractor]
            best = min(row, key=lambda name: row[name])
            shown = [f"{percent(row[name], 2)} ({ranks[name]:.2f})" for name in names]
            marked = [f"**{cell}**" if name == best else cell for name, cell in zip(names, shown, strict=True)]
            rows.append([size, extractor, *marked])
    caption = "Mean absolute error in points (Spearman correlation), by number of items and how they are chosen"
    yield Table(["items", "chosen", *names], rows, caption)
    yield _choosing_and_weighing(found, sizes[len(sizes) // 2])
    panels = [
        Lines(
            {name: [(int(size), found[key][size]["irt"][name]) for size in sizes] for name in names},
            Axis("items asked"),
            axis,
            "items chosen by IRT clustering",
            levels=levels,
        )
        for key, axis, levels in (
            ("mae", Axis("mean absolute error"), {"mean of the endpoints": guess}),
            ("spearman", Axis("rank correlation"), {}),
        )
    ]
    yield Figure(f"{record}_estimates", "Error and rank correlation of estimators by number of items", panels)
    yield from _abilities(found)


def _choosing_and_weighing(found: Mapping[str, Any], size: str) -> Text:
    def at(extractor: str, estimator: str) -> str:
        error, rank = (found[key][size][extractor][estimator] for key in ("mae", "spearman"))
        return f"{percent(error, 2)} points (rank correlation {rank:.2f})"

    return Text(
        f"With {size} items, the mean over random items is off by {at('random', 'naive')}. Over items chosen by IRT "
        f"clustering it is off by {at('irt', 'naive')}. If answers to random items are weighted by mp-irt, the "
        f"estimate is off by {at('random', 'mp-irt')}; with both, by {at('irt', 'mp-irt')}."
    )


def _abilities(found: Mapping[str, Any]) -> Iterator[Part]:
    irt, ability = found["irt"], found["ability"]
    values = irt["singular_values"]
    told = sum(value >= TOLD * values[0] for value in values)
    free = [row["estimators"]["p-irt"]["euclidean"] for row in ability.values()]
    prior = [row["estimators"]["p-irt (map)"]["euclidean"] for row in ability.values()]
    text = (
        f"Abilities: the IRT was fitted to {irt['models']} models that are not merges. It has {irt['dimensions']} "
        f"dimensions (by cross-validation), of which the items distinguish {told} (singular values of their "
        f"discriminations of at least {100 * TOLD:.0f} % of the largest). "
    )
    if told < irt["dimensions"]:
        text += (
            f"Along the other {irt['dimensions'] - told}, answers hardly depend on ability, so the maximum of the "
            "likelihood, which p-irt uses as published, can be anywhere. "
        )
    if any(row["separated"] for row in ability.values()):
        shares = ", ".join(f"{percent(row['separated'], 0)} % of the fits at {size}" for size, row in ability.items())
        text += (
            f"If some ability separates right from wrong answers ({shares} items), the likelihood has no maximum, and "
            "only a ridge of 10⁻⁶ bounds the fit. "
        )
    if min(free) > 10 * max(prior):
        off = [
            [row["estimators"][name]["probability"] for row in ability.values()] for name in ("p-irt", "p-irt (map)")
        ]
        text += (
            f"The distances of p-irt, {min(free):.0f} to {max(free):.0f}, are therefore those of an unregularised fit "
            f"and have no meaningful scale; with the fitted prior (map) they are {min(prior):.2f} to {max(prior):.2f}. "
            f"Probabilities are off by up to {percent(max(off[0]))} points without the prior and "
            f"{percent(max(off[1]))} with it. "
        )
    text += (
        f"With more items, p-irt comes {'closer' if free[-1] < free[0] else 'no closer'}. To compare methods, use the "
        "last number of each cell: the error of the probabilities of right answers. The reference, the posterior mode "
        "on all items, uses the same prior as the fits with a prior, which favours them."
    )
    yield Text(text)
    methods = list(next(iter(ability.values()))["estimators"])
    rows = [[size, *(_cell(row["estimators"][name]) for name in methods)] for size, row in ability.items()]
    caption = "Ability from few random items against all: distance (1 − cosine), error of probabilities in points"
    yield Table(["items", *methods], rows, caption)


def _cell(row: Mapping[str, float]) -> str:
    return f"{row['euclidean']:.2f} ({row['cosine']:.2f}), {percent(row['probability'])}"
