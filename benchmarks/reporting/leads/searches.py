"""Evolution and item response theory."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from benchmarks.reporting.formats import between, mebibytes, percent
from benchmarks.reporting.sections import evolution_costs, evolution_racing, evolution_skills


def costs(results: Mapping[str, Any]) -> str:
    races = {name: row for name, row in results["ways"].items() if name.startswith("race")}
    met = [name for name in races if evolution_costs.is_met(results, name)]
    cheaper = between([row["fewer_than_full"] for row in races.values()], 0)
    clear = [name for name, row in races.items() if row["interval"][0] > 0]
    quality = "none of them clearly loses accuracy" if not clear else f"clearly worse: {', '.join(clear)}"
    return (
        f"Race candidates, as `merganser evolve init` proposes: a search then takes {cheaper} times less processor "
        f"time than full evaluation without shared prompts, and {quality} ({len(met)} of {len(races)} meet the goal)."
    )


def memory(results: Mapping[str, Any]) -> str:
    forms = results["precision"]["forms"]
    biased = [
        form
        for form, rows in forms.items()
        if any(row["bias"]["low"] > 0 or row["bias"]["high"] < 0 for row in rows.values())
    ]
    safe = [form for form in forms if form not in biased]
    one, *others = results["memory"]
    more = f"; a second one takes {mebibytes(others[0]['private'] - one['private'])} for itself" if others else ""
    return (
        f"Workers share the models that they merge{more}. "
        + (f"Candidates in {' or '.join(safe)} score as in full precision here" if safe else "")
        + (f"{'; ' if safe else ''}{' and '.join(biased)} misjudges some" if biased else "")
        + ". Fewer bits save memory, not time."
    )


def skills(results: Mapping[str, Any]) -> str:
    means = {name: row["scores"]["mean"]["value"] for name, row in results["models"].items() if row["tried"]}
    best, evolved = max(means, key=lambda name: means[name]), evolution_skills.EVOLVED
    if best == evolved:
        return f"The search finds the best merge of both skills, with a mean of {percent(means[evolved])} %."
    return (
        f"Try a small grid before you search: on unseen items, the best of {results['models'][best]['tried']} merges "
        f"by {best} has a mean of {percent(means[best])} %, the winner of an evolutionary search with "
        f"{results['models'][evolved]['tried']} trials {percent(means[evolved])} %."
    )


def racing(results: Mapping[str, Any]) -> str:
    best = evolution_racing.cheapest(results)
    row = results["fitness"][best]
    return (
        f"A race finds as good a winner as full evaluation in {row['fewer_than_full']:.0f} times less processor time, "
        "if candidates differ as they do in this simulation."
    )


def few_items(results: Mapping[str, Any]) -> str:
    fitness = results["winners"]["fitness"]
    chosen = [row["loss"] for name, row in fitness.items() if ", irt " in name]
    drawn = [row["loss"] for name, row in fitness.items() if name != "full" and ", irt " not in name]
    unseen = fitness["full"]["unseen_error"]
    verdict = (
        "the difference is too small to tell here"
        if abs(fmean(drawn) - fmean(chosen)) < unseen / 4
        else "choose items by IRT if you have answers of other models"
    )
    return (
        "A few dozen items can replace a whole benchmark in a search. Winners lose "
        f"{percent(fmean(chosen))} points on average with items chosen by IRT and {percent(fmean(drawn))} with random "
        f"ones; {verdict}."
    )


def item_response(results: Mapping[str, Any]) -> str:
    fits = results["fits"]
    faster = [fit["times_faster"] for fit in fits if "times_faster" in fit]
    compared = f", {between(faster, 0)} times less than with py-irt" if faster else ""
    return f"Fitting the model of your items takes {between([fit['seconds'] for fit in fits])} s{compared}."
