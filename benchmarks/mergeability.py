"""What tells beforehand how much a pair of experts loses by merging: weights, or a few unlabelled inputs?

    python -m benchmarks.mergeability [--zoo text|images|mlp] [--experts NAME …] [--test N] [--inputs N] [--json FILE]

Ten minutes of one core (`--quick`: the six pairs of four experts, few inputs, one method). Every two of the eight text
experts, of the image experts, or of the experts of an MLP are merged in several ways and scored on test inputs of their
two tasks, each through its own head. The loss of a pair is 1 − normalised accuracy. Signals of the pair come from the
weights (`merganser.analysis.mergeability`) or from validation inputs without their labels (`benchmarks.probes`). What
FILE holds of the same experts stays and is not measured again.

Stored in `results`:

- `zoos`: of each the number of `test` inputs of each task and of unlabelled `inputs`, and the accuracy of each of the
  `experts` on its own task;
- `pairs`: the `zoo`, two `experts`, their `signals`, and by method in `methods` the `loss`, the `accuracies` on both
  tasks, and `disagreement`: the share of the unlabelled inputs that this merge itself answers otherwise than the
  experts.

The report computes rank correlations from the pairs, on tasks, methods and a network that a model was not fitted to.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.experts import Classifiers, summary
from benchmarks.image_experts import load_image_experts
from benchmarks.mlp_experts import MLP_TASKS, load_mlp_experts
from benchmarks.probes import Probes
from benchmarks.records import record
from benchmarks.text_experts import load_experts
from benchmarks.zoo.cards import add_locations
from benchmarks.zoo.image_tasks import IMAGE_TASKS
from benchmarks.zoo.text_tasks import TASKS
from merganser.analysis.mergeability import Pair, mergeability

AnyExperts = Classifiers[Any]
#: How the experts of a zoo are loaded, and which it has.
ZOOS: Mapping[str, tuple[Callable[..., AnyExperts], Sequence[str]]] = {
    "text": (load_experts, TASKS),
    "images": (load_image_experts, tuple(IMAGE_TASKS)),
    "mlp": (load_mlp_experts, MLP_TASKS),
}

#: Of the weights alone.
WEIGHT_SIGNALS = ("difficulty", "conflict", "overlap", "cosine", "sign_agreement", "distance", "imbalance", "bend")
#: The ways to merge a pair: a method, its parameters and its scale. The first one is the mean.
METHODS: Mapping[str, tuple[str, Mapping[str, Any], float]] = {
    "mean": ("task_arithmetic", {}, 0.5),
    "TIES": ("ties", {"density": 0.2}, 1.0),
    "TSV-M": ("tsv", {}, 1.0),
    "Iso-C": ("iso_c", {}, 1.0),
}


def weight_signals(pair: Pair) -> dict[str, float]:
    """The signals that need no data; `bend` only if the runs are known."""
    found = {name: getattr(pair, name) for name in WEIGHT_SIGNALS}
    return {name: value for name, value in found.items() if value is not None}


def unmerged(experts: AnyExperts, probes: Probes, early: AnyExperts | None = None) -> list[dict[str, Any]]:
    """Every pair of experts and its signals; `early`, the experts after one epoch, give their bend."""
    trained = experts.trained
    runs = {name: [trained, early.experts[name], own] for name, own in experts.experts.items()} if early else None
    pairs = mergeability(trained, dict(experts.experts), runs=runs).pairs
    return [
        {"experts": list(pair.experts), "signals": weight_signals(pair) | probes.signals(pair.experts), "methods": {}}
        for pair in pairs
    ]


def measure(experts: AnyExperts, probes: Probes, method: str, pair: Sequence[str]) -> dict[str, Any]:
    """What merging a pair costs."""
    name, parameters, scale = METHODS[method]
    weights = experts.weights(experts.task_vector(name, pair, **parameters), scale)
    scores = experts.scores(weights, pair)
    loss = 1 - summary(scores, {expert: probes.accuracy[expert] for expert in pair})["normalised"]
    disagreement = probes.disagreement(weights, pair)
    print(f"{method}: {' + '.join(pair)} loses {loss:+.3f}, answers {disagreement:.3f} otherwise", flush=True)
    return {"loss": loss, "accuracies": list(scores.values()), "disagreement": disagreement}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--zoo", choices=ZOOS, default="text")
    parser.add_argument("--experts", nargs="+", metavar="NAME", help="of the zoo (default: all)")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="NAME")
    parser.add_argument("--test", type=int, default=200, help="test inputs of each task")
    parser.add_argument("--inputs", type=int, default=64, help="unlabelled inputs of each task")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    add_locations(parser)
    options = parser.parse_args(arguments)
    zoo, methods = options.zoo, options.methods
    load, known = ZOOS[zoo]
    names = options.experts or known
    if unknown := set(names) - set(known):
        parser.error(f"{zoo} has no experts {', '.join(sorted(unknown))}; it has {', '.join(known)}")
    sizes = {"test": options.test, "validation": options.inputs}
    if options.quick:
        names, methods, sizes = names[:4], methods[:1], {"test": 50, "validation": 16}
    places = (options.cache, options.data, names)
    experts = load(*places, **sizes)
    early = load(*places, test=0, validation=0, early=True) if zoo == "text" else None
    probes = Probes.of(experts, sizes["validation"])
    stored = json.loads(options.json.read_text())["results"] if options.json and options.json.exists() else {}
    results: dict[str, Any] = {"zoos": {}, "pairs": [], **stored}
    about = {"test": {name: len(task.test) for name, task in experts.tasks.items()}, "inputs": probes.inputs}
    about["experts"] = probes.accuracy
    if results["zoos"].get(zoo) != about:
        results["zoos"][zoo] = about
        rows = [{"zoo": zoo, **row} for row in unmerged(experts, probes, early)]
        results["pairs"] = [row for row in results["pairs"] if row["zoo"] != zoo] + rows
        record(options.json, results, [0], added=True)
    for method in methods:
        for row in results["pairs"]:
            if row["zoo"] == zoo and method not in row["methods"]:
                row["methods"][method] = measure(experts, probes, method, row["experts"])
        record(options.json, results, [0], added=True)


if __name__ == "__main__":
    main()
