"""Transformers from different seeds: the barrier between them, plain, by permutations and by orthogonal maps.

    python -m benchmarks.alignment_transformers --data DIR [--cache DIR] [--kind vit] [--source loss …] [--json FILE]

Trains small networks (`alignment_training`, about half a minute of processor each), or takes them from the cache; the
kind "vit-cifar10" is larger (six blocks of width 96), comes from the zoo, and takes some forty minutes to align. The
barrier is the loss of the mean network less the mean loss of its ends, in the plain form and after REPAIR on 8 batches
of training inputs. "weights" needs no data, "activations" the same 8 batches. "outputs" and "loss" learn the maps by
the straight-through estimator, in 200 steps for either group of maps: "outputs" makes the midpoint predict what the two
networks predict on average, on the same 8 batches without labels; "loss" lowers its loss on 40 labelled ones. Every
pair of seeds is matched by itself; three seeds or more are also matched jointly, in a universe or (by "outputs") to
the first, and the mean of all is scored. Goal: half the barrier of permutations found in the same way. The guard is the
median cosine of initial and trained weight matrices. With some of the kinds or sources, what the file has of the others
stays.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from itertools import combinations, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.alignment_training import KINDS, Task, drift, score, train
from benchmarks.machine import describe
from benchmarks.records import record
from merganser.align import Universe, match_to_reference, repair, symmetry, universe
from merganser.align.symmetries import Symmetry

Batch = tuple[Tensor, Tensor]

#: Batches for activations and REPAIR.
FEW = 8
SOURCES = ("weights", "activations", "outputs", "loss")
#: Sources by which maps are learned, and the batches and epochs of each.
LEARNED = {"outputs": (FEW, 25), "loss": (40, 5)}
#: Rates of the straight-through estimator (of weights, of maps), chosen by "loss" on ViTs of two other seeds.
RATES = {"permutation": 3e-3, "orthogonal": 0.03}


def aligned(networks: Sequence[nn.Module], known: Symmetry, source: str, kind: str, many: list[Batch]) -> Universe:
    """Two models, or maps that are learned: the others matched to the first. Else a universe."""
    inputs = [batch for batch, _ in many[:FEW]]
    options: dict[str, Any] = {"workers": 1}
    if source in LEARNED:
        count, epochs = LEARNED[source]
        batches = many[:count] if source == "loss" else [(x, mean_prediction(networks, x)) for x in inputs]
        options |= {"batches": batches, "loss": cross_entropy, "epochs": epochs, "learning_rate": RATES[kind]}
        return match_to_reference(networks, known, method="ste", **options)
    options |= {"batches": inputs} if source == "activations" else {}
    if len(networks) > 2:
        return universe(networks, known, **options)
    return match_to_reference(networks, known, method=source, **options)


def mean_prediction(networks: Sequence[nn.Module], inputs: Tensor) -> Tensor:
    """Return the mean over networks of the probabilities they predict."""
    with torch.no_grad():
        return torch.stack([network(inputs).softmax(-1) for network in networks]).mean(0)


def barriers(
    networks: Sequence[nn.Module], task: Task, size: int, sources: Sequence[str] = SOURCES, seed: int = 0
) -> list[dict[str, Any]]:
    """Loss and accuracy of the mean above those of its ends, for every way to align them."""
    many = list(islice(task.batches(size, seed + 1000), max(count for count, _ in LEARNED.values())))
    batches = [inputs for inputs, _ in many[:FEW]]
    test = task.test()
    ends = [score(network, test) for network in networks]
    loss, accuracy = (sum(values) / len(ends) for values in zip(*ends, strict=True))
    rows = []
    for kind in ("plain", "permutation", "orthogonal"):
        known = symmetry(networks[0], batches[0][:2], kind="orthogonal" if kind == "orthogonal" else "permutation")
        if kind == "plain":
            known = known.pin("*")
        possible = SOURCES[: 1 if kind == "plain" else 4 if len(networks) == 2 else 3]
        for source in (source for source in possible if source in sources):
            found = aligned(networks, known, source, kind, many)
            middle = type(networks[0])()
            middle.load_state_dict(found.merged())
            in_place = [found.to_universe(model) for model in range(len(found))]
            for repaired, network in ((False, middle), (True, repair(middle, in_place, batches))):
                merged_loss, merged_accuracy = score(network.eval(), test)
                rows.append(
                    {
                        "kind": kind,
                        "source": source,
                        "repair": repaired,
                        "barrier": merged_loss - loss,
                        "accuracy": merged_accuracy,
                        "ends": accuracy,
                    }
                )
                print(
                    f"  {kind:11} {source:11} {'REPAIR' if repaired else '':6}  barrier {merged_loss - loss:6.3f}   "
                    f"accuracy {merged_accuracy:.3f} of {accuracy:.3f}",
                    flush=True,
                )
    return rows


def _place(row: dict[str, Any]) -> tuple[Any, ...]:
    """Where a row stands: by the seeds, then the way."""
    ways = ("plain", "permutation", "orthogonal")
    return len(row["seeds"]), row["seeds"], ways.index(row["kind"]), SOURCES.index(row["source"]), row["repair"]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--kind", nargs="+", choices=tuple(KINDS), default=tuple(KINDS))
    parser.add_argument("--seeds", nargs="+", type=int, default=(0, 1, 2))
    parser.add_argument("--source", nargs="+", choices=SOURCES, default=SOURCES)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    print(describe())
    part = len(arguments.kind) < len(KINDS) or len(arguments.source) < len(SOURCES)
    part = part and arguments.json is not None and arguments.json.exists()
    found: dict[str, Any] = json.loads(arguments.json.read_text())["results"] if part else {}
    for kind in arguments.kind:
        _, read, size = KINDS[kind]
        task = read(arguments.data)
        pairs = [train(kind, seed, task, arguments.cache) for seed in arguments.seeds]
        cosines = [drift(initial, trained) for initial, trained in pairs]
        print(f"{kind}, {len(pairs)} seeds: cos(initial, trained) {', '.join(f'{c:.2f}' for c in cosines)}")
        networks = [trained for _, trained in pairs]
        groups = list(combinations(range(len(networks)), 2))
        groups += [tuple(range(len(networks)))] if len(networks) > 2 else []
        rows: list[dict[str, Any]] = []
        for group in groups:
            members = [arguments.seeds[i] for i in group]
            print(f" seeds {', '.join(map(str, members))}", flush=True)
            measured = barriers([networks[i] for i in group], task, size, arguments.source)
            rows += [{"seeds": members, **row} for row in measured]
        kept = [row for row in found.get(kind, {}).get("rows", ()) if row["source"] not in arguments.source]
        found[kind] = {"cosines": cosines, "rows": sorted([*kept, *rows], key=_place)}
        record(arguments.json, found, arguments.seeds, added=part)


if __name__ == "__main__":
    main()
