"""Two skills in one language model: a Pareto front, negative transfer against other merges, and few-shot prompts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.reporting.formats import percent
from benchmarks.reporting.parts import Axis, Figure, Lines, Part, Table, Text
from benchmarks.reporting.sections.evolution_costs import fine_tunes

EVOLVED = "evolved"


def interval(found: Mapping[str, float]) -> str:
    return f"{percent(found['value'])} ({percent(found['low'])} to {percent(found['high'])})"


def verdict(gain: Mapping[str, float]) -> str:
    return "better" if gain["low"] > 0 else "worse" if gain["high"] < 0 else "cannot tell"


def parts(results: Mapping[str, Any]) -> Iterator[Part]:
    models, skills = results["models"], list(results["unseen"])
    items = ", ".join(f"{count} of {name}" for name, count in results["unseen"].items())
    yield Text(
        f"Two {fine_tunes(results['fine_tuning'])} become one model. Everything is tuned on the same "
        f"{sum(results['pool'].values())} items and scored on {items} that nothing has seen, so that differences are "
        "paired item by item. *Evolved* is TIES with a density, a scale and for each model a weight at two points "
        "of depth, by a genetic algorithm; the other merges take the best of a grid; *few-shot* is the base with "
        "solved questions before each question. Negative transfer is the share of items that a model gets wrong "
        "among those that a fine-tune gets right; intervals are 95 %. Transfer between languages is not measured: the "
        "models and all question sets of the zoo are English."
    )
    rows = [
        [
            name,
            str(row["tried"] or "–"),
            *(percent(row["scores"][skill]["value"]) for skill in skills),
            interval(row["scores"]["mean"]),
            "–" if name == EVOLVED else interval(row["winner_gains"]["mean"]),
            f"{percent(row['transfer']['all']['rate'])} ± {percent(row['transfer']['all']['error'])}",
        ]
        for name, row in models.items()
    ]
    columns = ["model", "tried", *(f"{skill}, %" for skill in skills), "mean, %", "evolved is better by, points"]
    yield Table([*columns, "negative transfer, %"], rows, "Scores on unseen items")
    said = {
        name: verdict(row["winner_gains"]["mean"]) for name, row in models.items() if row["tried"] and name != EVOLVED
    }
    told = "; ".join(
        f"{word} {'than' if word != 'cannot tell' else 'from'} {', '.join(name for name in said if said[name] == word)}"
        for word in ("better", "worse", "cannot tell")
        if word in said.values()
    )
    same = [name for name in skills if models[name]["winner_gains"]["mean"]["value"] == 0]
    alike = f" It scores as the fine-tune for {same[0]} does: the search gained nothing by merging." if same else ""
    yield Text(f"The evolved merge, on the mean of both skills: {told}.{alike}")
    front = results["front"]
    first, second = skills
    yield Text(
        f"NSGA-II with one objective per skill ({results['trials']} trials) finds a front of {len(front)} on the "
        "pool. Any of them can be exported (`merganser evolve export --trial`)."
    )
    points = dict.fromkeys(tuple(interval(each["scores"][skill]) for skill in skills) for each in front)
    yield Table([f"{skill}, %" for skill in skills], list(points), "The front on unseen items; equal merges once")

    def place(row: Mapping[str, Any]) -> tuple[float, float]:
        return row["scores"][first]["value"], row["scores"][second]["value"]

    series = {"front": [place(each) for each in front]} | {name: [place(row)] for name, row in models.items()}
    yield Figure(
        "evolve_skills",
        "Scores of merges at two skills",
        [Lines(series, Axis(first, percent=True), Axis(second, percent=True), "Unseen items", scatter=True)],
    )
