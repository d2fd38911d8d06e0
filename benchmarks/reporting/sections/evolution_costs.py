"""What a winner costs end to end, on real language models: every processor second of whole studies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.reporting.formats import percent
from benchmarks.reporting.parts import Part, Table, Text

FULL = "full"
#: The learning rate of fine-tunes in results that do not name it.
UNTOLD_RATE = 5e-4
METHODS = {
    "task_arithmetic": "task arithmetic, with for each of them a weight at two points of depth",
    "ties": "TIES, with a density, a scale and for each of them a weight at two points of depth",
}


def is_met(results: Mapping[str, Any], way: str) -> bool:
    """Whether winners are within one standard error, at a fifth of the seconds of full and a third of gmp-IRT."""
    row = results["ways"][way]
    return bool(
        row["loss"] <= results["standard_error"] and row["fewer_than_full"] >= 5 and row["fewer_than_gmp_irt"] >= 3
    )


def fine_tunes(learned: Mapping[str, Mapping[str, float]]) -> str:
    """What fine-tunes of stories15M learned, and at which rate."""
    gains = ", ".join(
        f"{name} {percent(each['base'])} → {percent(each[f'{name}_right'])} %" for name, each in learned.items()
    )
    rate = max(each.get("rate", UNTOLD_RATE) for each in learned.values())
    return (
        f"fine-tunes of stories15M ({gains}; learning rate {rate:g}, which decides how much they "
        "[forget](experts.md#forgetting-a-new-skill-against-earlier-ones))"
    )


def parts(results: Mapping[str, Any]) -> Iterator[Part]:
    ways = results["ways"]
    seeds = len(ways[FULL]["runs"])
    counted = "one seed" if seeds == 1 else f"{seeds} seeds"
    yield Text(
        "Whole studies, from opening the checkpoints to the winner: two "
        f"{fine_tunes(results['fine_tuning'])} are merged by {METHODS[results['method']]}; {results['trials']} "
        f"trials by a genetic algorithm, {results['pool']} items to search on, {counted}, one thread. *Before* means "
        "that every option is asked as a whole sequence and that nothing is raced or re-ranked. Winners are scored on "
        f"{results['unseen']} items that no search has seen, the same for all ways, so that losses are paired item by "
        "item; these questions are the measurement and are not counted. *Race* is what `merganser evolve init` writes."
    )
    for way in (name for name in ways if name.startswith("race")):
        row = ways[way]
        low, high = (percent(value) for value in row["interval"])
        yield Text(
            f"{way.capitalize()}: the winner is {percent(abs(row['loss']))} points "
            f"{'below' if row['loss'] > 0 else 'above'} that of full evaluation (95 % interval of the loss {low} to "
            f"{high}), in {row['fewer_than_full']:.1f} times fewer seconds than full evaluation and "
            f"{row['fewer_than_gmp_irt']:.1f} times fewer than gmp-IRT. Goal (a loss of at most one standard error, "
            f"{percent(results['standard_error'])} points, in 5 and 3 times fewer seconds): "
            f"{'met' if is_met(results, way) else 'not met'}."
        )
    cells = [
        [
            name,
            percent(row["test"]),
            f"{percent(row['loss'])} ({percent(row['interval'][0])} to {percent(row['interval'][1])})",
            f"{row['questions']:,.0f}",
            f"{row['seconds']:.1f}",
            f"{row['merging']:.1f}",
            f"{row['asking']:.1f}",
            f"{row['machinery']:.1f}",
            f"{row['models_per_hour']:,.0f}",
            f"{row['fewer_than_full']:.1f}×",
            f"{row['fewer_than_gmp_irt']:.1f}×",
        ]
        for name, row in ways.items()
    ]
    columns = ["way", "winner on unseen items, %", "loss, points (95 %)", "questions", "seconds", "merging", "asking"]
    columns += ["rest", "models an hour", "fewer than full", "fewer than gmp-IRT"]
    yield Table(columns, cells, "Means over seeds; processor seconds of a study. The rest is search, store and fitting")
    others = {label: percent(score) for label, score in ways[FULL]["runs"][0]["others"].items()}
    said = ", ".join(f"{label} {score} %" for label, score in others.items())
    yield Text(f"On the same unseen items: {said}.")
    if ways[FULL]["test"] <= max(ways[FULL]["runs"][0]["others"].values()):
        yield Text(
            "The winner of full evaluation is no better than the best of these models, so that losing little to it "
            "says little about searches that gain by merging."
        )
