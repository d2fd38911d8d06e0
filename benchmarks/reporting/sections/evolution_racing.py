"""What a winner costs: full evaluation, few items and races, on simulated answers whose truth is known."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.reporting.formats import percent
from benchmarks.reporting.parts import Axis, Figure, Lines, Part, Table, Text

NAME = "evolve_racing"
#: What the goals compare with: evaluation as it was before prompts were shared.
BEFORE = "full, before"


def cheapest(results: Mapping[str, Any]) -> str:
    """The way with the fewest processor seconds whose winner is within one standard error of full evaluation's."""
    rows = results["fitness"]
    good = [name for name, row in rows.items() if row["loss"] <= results["standard_error"] / 2 and "race" in name]
    return min(good or rows, key=lambda name: rows[name]["seconds"])


def parts(results: Mapping[str, Any]) -> Iterator[Part]:
    rows, best = results["fitness"], cheapest(results)
    row = rows[best]
    yield Text(
        "Three experts are simulated; their merges mix abilities and interfere. An item is answered correctly when "
        "ability plus luck, the same for all candidates, exceeds its difficulty, so the true score of a winner is "
        "known. Costs are the questions and merges that the study counts, times the cost of one question and one merge "
        "of a language model of 135M parameters. *Before* means without shared prompts. A *race* asks candidates in "
        "rungs and stops those that fall behind; *soft* scores by the probability of the right option."
    )
    yield Text(
        "Goal: a winner within one standard error of that of full evaluation "
        f"({percent(results['standard_error'])} points), in a fifth of its seconds and a third of those of gmp-IRT, "
        f"both without shared prompts. {best.capitalize()} has a loss of {percent(row['loss'])} ± "
        f"{percent(row['loss_error'])} points in {row['fewer_than_full']:.1f} and {row['fewer_than_gmp_irt']:.1f} "
        "times fewer seconds: "
        f"{'met' if row['fewer_than_full'] >= 5 and row['fewer_than_gmp_irt'] >= 3 else 'not met'} in simulation."
    )
    cells = [
        [
            name,
            percent(each["score"]),
            f"{percent(each['loss'])} ± {percent(each['loss_error'])}",
            f"{each['questions']:,.0f}",
            f"{each['seconds']:,.0f}",
            f"{each['fewer_than_full']:.1f}×",
            f"{each['fewer_than_gmp_irt']:.1f}×",
        ]
        for name, each in rows.items()
    ]
    columns = ["way", "true score of the winner, %", "loss, points", "questions", "seconds", "fewer than full"]
    yield Table([*columns, "fewer than gmp-IRT"], cells)
    panel = Lines(
        {name: [(each["seconds"], each["score"])] for name, each in rows.items()},
        Axis("processor seconds of a study", log=True),
        Axis("true score of the winner", percent=True),
        scatter=True,
    )
    yield Figure(NAME, "True score of the winner against what the search cost", [panel])
    stopped = results["stopped_by_gain"]
    said = ", ".join(f"{percent(float(gain), 0)} points in {percent(share, 0)} %" for gain, share in stopped.items())
    yield Text(f"A race stops a candidate that is truly better than the incumbent by at least {said} of the cases.")
