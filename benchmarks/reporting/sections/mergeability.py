"""Whether a score of weights alone ranks pairs of experts by what merging them costs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.reporting.formats import percent
from benchmarks.reporting.parts import Axis, Figure, Lines, Part, Table, Text


def parts(results: Mapping[str, Any]) -> Iterator[Part]:
    pairs, correlations = results["pairs"], results["correlations"]
    found = {row.get("signal", row.get("name")): row for row in correlations}
    score = found.get("difficulty", correlations[0])
    losses = sorted(pair["loss"] for pair in pairs)
    yield Text(
        f"We averaged all pairs of {len(results['experts'])} text experts. They lose between {percent(losses[0])} and "
        f"{percent(losses[-1])} % of their accuracy. The difficulty guessed from the weights has a rank correlation of "
        f"{score['rho']:.2f} with the loss (p = {score['p']:.2g}, which is optimistic because pairs share experts)"
        f"{', so it predicts nothing here' if score['rho'] <= 0 or score['p'] > 0.05 else ''}. "
        f"Goal of 0.6 on held-out pairs: {'met' if score['rho'] >= 0.6 else 'not met'} (nothing was fitted to these "
        "pairs)."
    )
    cells = [[str(name), f"{row['rho']:.2f}", f"{row['p']:.2g}"] for name, row in found.items()]
    yield Table(["signal", "Spearman's ρ with the loss", "p"], cells)
    points = [(pair["difficulty"], pair["loss"]) for pair in pairs]
    panel = Lines({"pairs of experts": points}, Axis("difficulty guessed"), Axis("loss", percent=True), scatter=True)
    yield Figure("mergeability", "Loss of merged pairs against the difficulty guessed", [panel])
    worst = sorted(pairs, key=lambda pair: pair["loss"], reverse=True)
    cells = [[f"{pair['a']} + {pair['b']}", f"{pair['difficulty']:.3f}", percent(pair["loss"])] for pair in worst]
    yield Table(["pair", "difficulty", "loss, %"], [*cells[:3], *cells[-3:]], "The worst and the best pairs")
