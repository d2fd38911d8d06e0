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
    "vit-cifar10": "Patch transformers with LayerNorm, six blocks of width 96 (CIFAR-10)",
}
Key = tuple[str, str, bool]


def parts(results: Mapping[str, Any]) -> Iterator[Part]:
    """A table for each kind of network, and what is left of the barrier of permutations."""
    yield Text(
        "Small transformers (three blocks of width 48, unless a caption says otherwise) of one task from different "
        "seeds. The barrier is the loss of the mean network less the mean loss of the networks. Pairs are matched one "
        "to the other; all seeds are matched jointly, in a universe of permutations or of orthogonal maps (by "
        "*outputs* to the first). *Weights* needs no data; *activations* and REPAIR use eight batches of inputs. By "
        "*outputs* and by *loss*, maps are learned with the straight-through estimator, in 200 steps for permutations "
        "and for orthogonal maps: *outputs* makes the mean of two networks predict what they predict on average, on "
        "the same eight batches without labels; *loss* lowers its loss on forty batches with labels. The rate of "
        "either group was chosen by *loss* on two other seeds. Means over all pairs with one standard error; "
        "accuracies in percent."
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
    return [_barrier(rows), percent(fmean(row["accuracy"] for row in rows))]


def _barrier(rows: Sequence[Mapping[str, Any]]) -> str:
    barriers = [row["barrier"] for row in rows]
    error = f" ± {stdev(barriers) / len(barriers) ** 0.5:.2f}" if len(barriers) > 1 else ""
    return f"{fmean(barriers):.2f}{error}"


def _verdict(name: str, by: Mapping[Key, Sequence[Mapping[str, Any]]]) -> str:
    """How much of the barrier of permutations orthogonal maps leave: like with like, then the best with the best."""
    means = {key: fmean(row["barrier"] for row in rows) for key, rows in by.items()}
    wide, narrow = ({key: by[key] for key in by if key[0] == kind} for kind in ("orthogonal", "permutation"))
    shares = {key: means[key] / means["permutation", key[1], key[2]] for key in wide}
    said = ", ".join(f"{share:.2f} {_way(key)}" for key, share in shares.items())
    met = sum(share <= 1 / 2 for share in shares.values())
    first, second = (min(each, key=lambda key: means[key]) for each in (narrow, wide))
    best, over = means[second] / means[first], "pairs" if len(by[first]) > 1 else "seeds"
    return (
        f"Share of the barrier of permutations that orthogonal maps leave between {name}: {said}. Goal: half or less: "
        f"met in {met} of {len(shares)} rows. The best permutations ({_way(first)}) leave a barrier of "
        f"{_barrier(by[first])} and the best orthogonal maps ({_way(second)}) {_barrier(by[second])} over the same "
        f"{over}, a share of {best:.2f}: {'half or less' if best <= 1 / 2 else 'more than half'}."
    )


def _way(key: Key) -> str:
    return f"by {key[1]}{' and REPAIR' if key[2] else ''}"
