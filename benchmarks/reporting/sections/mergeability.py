"""Which signals rank pairs of experts by what merging them costs: of the weights, or of a few unlabelled inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.held_out import fit, predictions
from benchmarks.reporting.formats import percent
from benchmarks.reporting.parts import Axis, Figure, Lines, Part, Table, Text
from merganser.analysis.mergeability import rank_correlation

GOAL = 0.6
#: The signal that takes one merge of each pair, its mean, and no labels.
ESTIMATE = "disagreement"
#: The signals, what they are made from, and what they are; others that are stored are of the weights.
INPUTS = {
    "disagreement": "inputs that the mean answers otherwise than the experts",
    "divergence": "KL divergence of the mean from the experts",
    "turned": "angle between the changes of the logits by the expert and by the mean",
    "halved": "inputs that half a task vector answers otherwise",
    "base": "inputs that the base answers otherwise",
}
GRADIENTS = {
    "slope": "first-order change of the loss from the expert to the mean",
    "pull": "first-order change of the base's loss by the other task vector",
    "alignment": "cosine of the other task vector with the descent direction of the base",
}
#: Experts that the line fitted to those of text never saw, by zoo.
STRANGERS = {"images": "EfficientNet-Lite0 experts", "mlp": "MLP experts"}


def pairs_of(results: Mapping[str, Any], zoo: str = "text") -> list[Mapping[str, Any]]:
    return [row for row in results["pairs"] if row["zoo"] == zoo]


def correlation(rows: Sequence[Mapping[str, Any]], signal: str, method: str) -> float:
    """Spearman's ρ of a signal with the losses of a method."""
    return rank_correlation([row["signals"][signal] for row in rows], losses(rows, method))


def own_correlation(rows: Sequence[Mapping[str, Any]], method: str) -> float:
    """Spearman's ρ of the disagreement of the merges themselves with what they lose."""
    return rank_correlation([row["methods"][method]["disagreement"] for row in rows], losses(rows, method))


def losses(rows: Sequence[Mapping[str, Any]], method: str) -> list[float]:
    return [row["methods"][method]["loss"] for row in rows]


def parts(results: Mapping[str, Any]) -> Iterator[Part]:
    rows = pairs_of(results)
    methods, signals = list(rows[0]["methods"]), list(rows[0]["signals"])
    about = results["zoos"]["text"]
    several = len(methods) > 1
    yield Text(
        f"We {'merged' if several else 'averaged'} all {len(rows)} pairs of {len(about['experts'])} text experts"
        f"{f' in {len(methods)} ways' if several else ''}. The share of their accuracy that a pair loses is measured "
        f"on {max(about['test'].values())} test sentences of each task. Signals come from the weights, or from "
        f"{about['inputs']} other sentences of each task without their labels: the experts' own answers stand in for "
        "those."
    )
    cells = [
        [name.replace("_", " "), describe(name), *(f"{correlation(rows, name, method):.2f}" for method in methods)]
        for name in sorted(signals, key=lambda name: (name in INPUTS, name in GRADIENTS))
    ]
    if several:
        own = [own_correlation(rows, method) for method in methods]
        what = "inputs that the merge itself, not the mean, answers otherwise"
        cells.append(["own disagreement", what, *(f"{rho:.2f}" for rho in own)])
    yield Table(["signal", "what it is", *methods], cells, "Spearman's ρ of signals of a pair with what it loses")
    yield from held_out(results, methods)
    series = {
        method: [(row["methods"][method]["disagreement"], row["methods"][method]["loss"]) for row in rows]
        for method in methods
    }
    axes = Axis("inputs that the merge answers otherwise", percent=True), Axis("loss", percent=True)
    yield Figure("mergeability", "Loss of merged pairs against the disagreement", [Lines(series, *axes, scatter=True)])
    order = sorted(rows, key=lambda row: -row["methods"][methods[0]]["loss"])
    worst = [
        [
            " + ".join(row["experts"]),
            percent(row["signals"][ESTIMATE]),
            *(percent(losses([row], m)[0]) for m in methods),
        ]
        for row in (*order[:3], *order[-3:])
    ]
    yield Table(["pair", "disagreement, %", *(f"loss, {m}, %" for m in methods)], worst, "The worst and the best pairs")


def held_out(results: Mapping[str, Any], methods: Sequence[str]) -> Iterator[Part]:
    """A line fitted to other experts and other methods, and whether it meets the goal, here and on other networks."""
    rows = pairs_of(results)
    zoos = {zoo: strangers for zoo in STRANGERS if (strangers := pairs_of(results, zoo))}
    others = {method: [other for other in methods if other != method] or [method] for method in methods}
    trials = {"other text experts": (rows, rows)}
    for zoo, strangers in zoos.items():
        trials[f"{STRANGERS[zoo]}, by text experts"] = (rows, strangers)
        trials[f"text experts, by {STRANGERS[zoo]}"] = (strangers, rows)
    found = {
        name: {
            m: (predictions(known, tested, m, others[m]), losses(tested, m))
            for m in methods
            if all(m in row["methods"] for row in tested)
        }
        for name, (known, tested) in trials.items()
    }
    ranked = {name: {m: rank_correlation(*pair) for m, pair in of.items()} for name, of in found.items()}
    yield Text(
        "What a merge loses is predicted by a line through 0 from its own disagreement, fitted to pairs that share no "
        f"expert with it{' and to the other methods' if len(methods) > 1 else ''}. Goal (a rank correlation of {GOAL} "
        f"on held-out pairs and methods): {_judge(ranked['other text experts'])}. {_noise(rows, methods[0])}"
    )
    for zoo, strangers in zoos.items():
        about = results["zoos"][zoo]
        kind, there = STRANGERS[zoo], ranked[f"{STRANGERS[zoo]}, by text experts"]
        yield Text(
            f"The line of the text experts was also tried on all {len(strangers)} pairs of {len(about['experts'])} "
            f"{kind} ({', '.join(about['experts'])}), which it has never seen, with {about['inputs']} "
            f"unlabelled images and {max(about['test'].values()):,} test images of each task. The same goal on another "
            f"backbone: {_judge(there)}. The other way round, from the line of the {kind} to text experts: "
            f"{_judge(ranked[f'text experts, by {kind}'])}. The slope of a line does not change the order of "
            "the pairs of another network; it decides how far off their losses are."
        )
    cells = [[m, *(_cell(*of[m]) if m in of else "–" for of in found.values())] for m in methods]
    caption = "ρ of predicted and measured losses, and how far apart they are on average, in points"
    yield Table(["method", *trials], cells, caption)
    slope, spread = fit([row for row in results["pairs"] if set(methods) <= set(row["methods"])], methods)
    yield Text(
        f"Fitted to all pairs and methods, the share of their accuracy that experts lose is {slope:.2f} times the "
        f"share of inputs that the merge answers otherwise, ± {percent(spread)} points. `mg.analysis.pair_losses` and "
        "`mg.tuning.auto` estimate losses in this way."
    )


def _cell(guessed: Sequence[float], measured: Sequence[float]) -> str:
    return f"{rank_correlation(guessed, measured):.2f}, {percent(_gap(guessed, measured))}"


def _gap(guessed: Sequence[float], measured: Sequence[float]) -> float:
    return sum(abs(guess - loss) for guess, loss in zip(guessed, measured, strict=True)) / len(guessed)


def _judge(found: Mapping[str, float]) -> str:
    """For which methods the goal is met."""
    met = [method for method, rho in found.items() if rho >= GOAL]
    missed = [method for method in found if method not in met]
    if met and missed:
        return f"met for {', '.join(met)}, not met for {', '.join(missed)}"
    return "not met" if missed else "met"


def _noise(rows: Sequence[Mapping[str, Any]], method: str) -> str:
    """How well the costliest pairs are found, and how close together the others are."""
    found, quarter = sorted(losses(rows, method)), len(rows) // 4
    costly = sorted(rows, key=lambda row: -row["methods"][method]["loss"])[:quarter]
    suspected = sorted(rows, key=lambda row: -row["signals"][ESTIMATE])[:quarter]
    both = sum(row in suspected for row in costly)
    return (
        f"Of the costliest quarter of the pairs with the {method}, {both} of {quarter} are in the quarter that "
        f"disagrees most. The half in the middle loses between {percent(found[quarter])} and "
        f"{percent(found[-quarter - 1])} %."
    )


def of_weights(signal: str) -> bool:
    """Return whether a signal needs no inputs."""
    return signal not in INPUTS and signal not in GRADIENTS


def describe(signal: str) -> str:
    """Return what a signal is."""
    return INPUTS.get(signal) or GRADIENTS.get(signal) or "of the weights"
