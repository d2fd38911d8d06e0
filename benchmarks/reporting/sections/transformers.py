"""Transformers from several seeds: barriers by permutations and by orthogonal maps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from benchmarks.reporting.formats import percent
from benchmarks.reporting.parts import Part, Table, Text

NETWORKS = {
    "vit": "Image classifiers with LayerNorm (Fashion-MNIST)",
    "gpt": "Character models with RMSNorm (film reviews)",
}
Key = tuple[str, str, bool]


def parts(results: Mapping[str, Any]) -> Iterator[Part]:
    """A table for each kind of network, and what is left of the barrier of permutations."""
    yield Text(
        "Small transformers (three blocks of width 48) of one task from different seeds. The barrier is the loss of "
        "the mean network less the mean loss of the networks. Pairs are matched one to the other; all seeds are "
        "matched jointly, in a universe of permutations or of orthogonal maps. *Weights* needs no data; *activations* "
        "and REPAIR use eight batches of inputs, *loss* forty with labels, to lower the loss of the mean of two by the "
        "straight-through estimator: 200 steps for permutations and for orthogonal maps, the rate of either chosen on "
        "two other seeds. Means over all pairs with one standard error; accuracies in percent."
    )
    for kind, found in results.items():
        rows = found["rows"]
        seeds = max(len(row["seeds"]) for row in rows)
        pairs, joint = _by_way(rows, 2), _by_way(rows, seeds) if seeds > 2 else {}
        cells = []
        for (way, source, repaired), own in pairs.items():
            cells.append([way, source if way != "plain" else "–", "yes" if repaired else "", *_cells(own)])
            if joint:
                cells[-1] += _cells(together) if (together := joint.get((way, source, repaired))) else ["–", "–"]
        columns = ["alignment", "by", "REPAIR", "barrier of pairs", "accuracy"]
        columns += [f"barrier of all {seeds}", "accuracy"] if joint else []
        cosine = fmean(found["cosines"])
        ends = percent(fmean(row["ends"] for row in rows))
        caption = f"{NETWORKS[kind]}: {ends} % alone; median cosine with the initial weights {cosine:.2f}"
        yield Table(columns, cells, caption)
        for name, by in (("two seeds", pairs), (f"all {seeds} seeds", joint)):
            if by:
                yield Text(_verdict(name, by))


def _by_way(rows: Sequence[Mapping[str, Any]], count: int) -> dict[Key, list[Mapping[str, Any]]]:
    found: dict[Key, list[Mapping[str, Any]]] = {}
    for row in rows:
        if len(row["seeds"]) == count:
            found.setdefault((row["kind"], row["source"], row["repair"]), []).append(row)
    return found


def _cells(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    barriers = [row["barrier"] for row in rows]
    error = f" ± {stdev(barriers) / len(barriers) ** 0.5:.2f}" if len(barriers) > 1 else ""
    return [f"{fmean(barriers):.2f}{error}", percent(fmean(row["accuracy"] for row in rows))]


def _verdict(name: str, by: Mapping[Key, Sequence[Mapping[str, Any]]]) -> str:
    """How much of the barrier of permutations orthogonal maps leave, like with like."""
    said, met = [], []
    for source in dict.fromkeys(source for way, source, _ in by if way == "orthogonal"):
        for repaired in (False, True):
            wide, narrow = (
                fmean(row["barrier"] for row in by[k, source, repaired]) for k in ("orthogonal", "permutation")
            )
            met.append(wide <= narrow / 2)
            said.append(f"{wide / narrow:.2f} by {source}{' and REPAIR' if repaired else ''}")
    verdict = "met" if all(met) else "not met" if not any(met) else f"met in {sum(met)} of {len(met)} rows"
    shares = f"between {name}: {', '.join(said)}"
    return f"Share of the barrier of permutations that orthogonal maps leave {shares}. Goal: half or less: {verdict}."
