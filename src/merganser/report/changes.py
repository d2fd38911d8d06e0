"""The changes of a merge by layer: distances from base and parents, and shares of the parents."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from merganser.checkpoints.tensor_names import block_of, natural_order
from merganser.engine.changes import Change, Changes
from merganser.report.charts import Dot, dot_plot
from merganser.report.page import Page
from merganser.report.tables import Table


@dataclass(frozen=True)
class LayerChange:
    """The combined changes of the tensors of a layer. Distances are relative to the norm before."""

    name: str
    entries: int
    before: float
    after: float
    to_base: float | None
    to_parents: dict[str, float]
    shares: dict[str, float]
    conflicts: float


def fill(page: Page, changes: Changes) -> None:
    """Add charts and a table of the changes in every layer."""
    if layers := combine_by_layer(changes):
        page.heading("What the merge changed")
        parents = list(dict.fromkeys(name for layer in layers for name in layer.to_parents))
        page.chart(_draw_distances(layers, parents))
        page.chart(_draw_shares(layers, parents))
        if len(parents) > 1:
            page.chart(_draw_conflicts(layers))
        page.add(layers_table(layers, parents), folded=True)


def combine_by_layer(changes: Changes) -> list[LayerChange]:
    """Return the changes of every layer in which something was merged, in natural order."""
    names = shorten_labels(changes.labels)
    groups: dict[str, list[Change]] = {}
    for name, change in changes.tensors.items():
        if change.looked_at:
            groups.setdefault(block_of(name), []).append(change)
    return [put_together(name, groups[name], names) for name in sorted(groups, key=natural_order)]


def put_together(name: str, changes: Sequence[Change], labels: Sequence[str]) -> LayerChange:
    """Return the combined change of several tensors: squares add up, shares are weighted by entries."""
    before = _norm(change.before for change in changes)
    scale = before or 1.0
    bases = [change.to_base for change in changes if change.to_base is not None]
    squares, pulls, moved = (
        defaultdict[str, float](float),
        defaultdict[str, float](float),
        defaultdict[str, float](float),
    )
    for change in changes:
        for parent, gap, share in zip(change.parents, change.to_parents, change.shares, strict=True):
            squares[labels[parent]] += gap * gap
            pulls[labels[parent]] += share * change.entries
            moved[labels[parent]] += change.entries
    entries = sum(change.entries for change in changes)
    return LayerChange(
        name,
        entries,
        before,
        _norm(change.after for change in changes),
        _norm(bases) / scale if bases else None,
        {label: math.sqrt(square) / scale for label, square in squares.items()},
        {label: pull / moved[label] for label, pull in pulls.items()},
        sum((change.conflicts or 0.0) * change.entries for change in changes) / max(1, entries),
    )


def verdict(changes: Changes) -> str:
    """Describe what the merge did in a few sentences."""
    merged = [change for change in changes.tensors.values() if change.looked_at]
    kinds = Counter(change.method for change in changes.tensors.values())
    kept = ", ".join(f"{kinds[kind]:,} {kind}" for kind in ("copied", "cast") if kinds[kind])
    counted = f"{len(changes.tensors):,} tensors" + (f", of which {kept}" if kept else "")
    if not merged:
        return f"Nothing was merged: {counted}."
    whole = put_together("", merged, shorten_labels(changes.labels))
    said = []
    nearest = min(whole.to_parents, key=lambda label: whole.to_parents[label])
    if whole.to_base is not None:
        said.append(
            "The result is the base."
            if whole.to_base == 0
            else f"The distance from the base is {whole.to_base:.2%} of the base's norm."
        )
    if len(whole.to_parents) > 1:
        shares = ", ".join(f"{label} {share:.2f}" for label, share in whole.shares.items())
        said.append(
            f"Shares of the parents: {shares}; the nearest is {nearest} ({whole.to_parents[nearest]:.2%} away)."
        )
        said.append(f"The parents pull {whole.conflicts:.0%} of the entries in opposite directions.")
        weak = [
            label for label, share in whole.shares.items() if abs(share) < 0.05 * max(map(abs, whole.shares.values()))
        ]
        if weak:
            said.append(f"Almost nothing is left of {', '.join(weak)}.")
    else:
        said.append(f"The share of {nearest} is {whole.shares[nearest]:.2f}.")
    growth = whole.after / whole.before - 1 if whole.before else 0.0
    if abs(growth) > 0.02:
        said.append(f"The weights {'grew' if growth > 0 else 'shrank'}: their norm changed by {growth:+.1%}.")
    seen = sum(change.looked_at for change in merged) / max(1, sum(change.entries for change in merged))
    return " ".join([*said, f"{counted}; measured on {seen:.1%} of the merged entries."])


def layers_table(layers: Sequence[LayerChange], parents: Sequence[str]) -> Table:
    """Return the table behind the charts."""
    with_base = any(layer.to_base is not None for layer in layers)
    columns = ["layer", "entries", "norm before", "norm after", *(["to base"] if with_base else [])]
    columns += [f"to {name}" for name in parents] + [f"share of {name}" for name in parents] + ["sign conflicts"]
    rows = [
        [
            *(layer.name, layer.entries, layer.before, layer.after),
            *([layer.to_base] if with_base else []),
            *(layer.to_parents.get(name) for name in parents),
            *(layer.shares.get(name) for name in parents),
            layer.conflicts,
        ]
        for layer in layers
    ]
    return Table(columns, rows, "Changes by layer; distances in units of the norm before")


def shorten_labels(labels: Sequence[str]) -> list[str]:
    """Return the last parts of labels that are paths, as long as they are unique."""
    short = [PurePath(label).name or label for label in labels]
    return short if len(set(short)) == len(short) else list(labels)


def _draw_distances(layers: Sequence[LayerChange], parents: Sequence[str]) -> str:
    dots = []
    for layer in layers:
        dots += [Dot(layer.name, layer.to_parents[p], series=i) for i, p in enumerate(parents) if p in layer.to_parents]
        if layer.to_base is not None:
            dots.append(Dot(layer.name, layer.to_base, series=len(parents)))
    legend = [*parents, *(["the base"] if any(layer.to_base is not None for layer in layers) else [])]
    caption = "Distance of the result from the base and from each parent; 0.1 is a tenth of the layer's norm before."
    return dot_plot(dots, "distance, in units of the norm before", legend=legend, caption=caption)


def _draw_shares(layers: Sequence[LayerChange], parents: Sequence[str]) -> str:
    dots = [
        Dot(layer.name, layer.shares[name], series=number)
        for layer in layers
        for number, name in enumerate(parents)
        if name in layer.shares
    ]
    caption = "Share of each parent in the result, by the best fit of the result with the parents."
    return dot_plot(dots, "share of each parent", legend=parents, guide=0.0, caption=caption)


def _draw_conflicts(layers: Sequence[LayerChange]) -> str:
    caption = "Entries that some parents raised and others lowered."
    return dot_plot([Dot(layer.name, layer.conflicts) for layer in layers], "sign conflicts", caption=caption)


def _norm(values: Iterable[float | None]) -> float:
    return math.sqrt(math.fsum(value * value for value in values if value is not None))
