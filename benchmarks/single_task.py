"""Networks trained apart on one task, merged: the thesis' table at this scale.

    python -m benchmarks.single_task [--arch mlp] [--dataset mnist] [--seeds 0 1 2] [--counts 2 3] [--json FILE]

Takes models of `benchmarks.zoo.vision` and prints test accuracy and loss of the plain mean, of every model matched to
the first by weights and by activations, of MergeMany by coordinate ascent and by Frank-Wolfe (mean and spread over
seeds: it visits models in random order) and of C²M³ on weights and on activations, each with and without REPAIR against
the mapped endpoints, for growing numbers of models. Networks with BatchNorm get recomputed statistics for REPAIR. Which
images are classified correctly after REPAIR is stored too, so that ways are compared in pairs. Every row is stored at
once, and a row that the JSON file holds already is kept, so that a run can be stopped and extended by more models.
About two minutes for five MLPs, five for two ResNet20 and twenty more for up to five, on one thread.

`guards` in the results say whether the networks have learned anything that matching could find: the median cosine of
initial and trained weights of every network, from its card, and the cosine of two networks before and after C²M³, of
the first two as they are and as they were before training.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.answers import pack
from benchmarks.machine import describe
from benchmarks.records import record
from benchmarks.zoo.architectures import ARCHITECTURES
from benchmarks.zoo.cards import Card, add_locations, read_card
from benchmarks.zoo.images import DATASETS, Split, load_images
from benchmarks.zoo.vision import answer, evaluate, initial_model, load_model, model_directory
from merganser import align
from merganser.align.permutations import identity
from merganser.align.solver import objective_of
from merganser.align.state import states_of

#: By default as many images as the processor affords to test on, to REPAIR on and to compare activations on; the splits
#: are shuffled, so that the first ones are a sample. A unit of a convolution shows itself at every pixel.
IMAGES = {
    "mnist": (10_000, 10_000, 2_000),
    "fashion_mnist": (10_000, 10_000, 2_000),
    "cifar10": (5_000, 2_000, 500),
}
Row = dict[str, Any]


def loaded(template: nn.Module, state: Mapping[str, Tensor]) -> nn.Module:
    """A copy of a module with other weights."""
    model = copy.deepcopy(template)
    model.load_state_dict(dict(state))
    return model.eval()


def unmoved(models: Sequence[nn.Module], symmetry: align.Symmetry) -> align.Universe:
    """Models that stay as they are: their mean is the plain one."""
    states = states_of(models, symmetry)
    still = [identity(symmetry)] * len(states)
    return align.Universe(symmetry, tuple(states), tuple(still), objective_of(states, still, symmetry))


def repaired(found: align.Universe, merged: nn.Module, batches: Sequence[Tensor], one_pass: bool) -> nn.Module:
    """REPAIR of a merge against its endpoints in the space where they were merged."""
    endpoints = [found.to_universe(i) for i in range(len(found))]
    return align.repair(merged, endpoints, batches, sequential=not one_pass)


def scores(
    found: align.Universe, template: nn.Module, batches: Sequence[Tensor], test: Split, one_pass: bool = False
) -> Row:
    """Accuracy and loss of the merge, both after REPAIR, and which images it then classifies correctly, as bits."""
    merged = loaded(template, found.merged())
    accuracy, loss = evaluate(merged, test)
    right, repaired_loss = answer(repaired(found, merged, batches, one_pass), test)
    return {
        "accuracy": accuracy,
        "loss": loss,
        "repaired_accuracy": float(right.mean()),
        "repaired_loss": repaired_loss,
        "repaired_right": [pack(right)],
        "objective": found.objective,
        "cycle_error": found.cycle_error(),
    }


def means(runs: Sequence[Row]) -> Row:
    """Means of scores over seeds, the bits of all, and, of several, the standard deviation of both accuracies."""
    found: Row = {
        key: [bits for run in runs for bits in run[key]]
        if key == "repaired_right"
        else statistics.mean(run[key] for run in runs)
        for key in runs[0]
    }
    if len(runs) > 1:
        found["spread"] = statistics.pstdev(run["accuracy"] for run in runs)
        found["repaired_spread"] = statistics.pstdev(run["repaired_accuracy"] for run in runs)
    return found | {"runs": len(runs)}


def ways(
    models: Sequence[nn.Module],
    symmetry: align.Symmetry,
    batches: Sequence[Tensor],
    seen: Sequence[Tensor],
    test: Split,
    tries: int,
    one_pass: bool = False,
) -> dict[str, Callable[[], Row]]:
    """Return every way to merge these models, with a function that measures it.

    Args:
        batches: Images to REPAIR on.
        seen: Images to compare activations on.
        test: Images to test on.
        tries: Random orders of MergeMany.
        one_pass: REPAIR all layers in one pass.
    """

    def scored(found: align.Universe) -> Row:
        return scores(found, models[0], batches, test, one_pass)

    def many(method: str) -> Row:
        orders = (align.merge_many(models, symmetry, method=method, seed=seed) for seed in range(tries))
        return means([scored(found) for found in orders])

    to_first = functools.partial(align.match_to_reference, models, symmetry, 0)
    return {
        "plain mean": lambda: scored(unmoved(models, symmetry)),
        "match to the first": lambda: scored(to_first(start="identity", tries=1)),
        "match activations to the first": lambda: scored(to_first(method="activations", batches=seen)),
        "MergeMany": lambda: many("weights"),
        "MergeMany by Frank-Wolfe": lambda: many("frank_wolfe"),
        "C²M³": lambda: scored(align.universe(models, symmetry)),
        "C²M³ on activations": lambda: scored(align.universe(models, symmetry, batches=seen)),
    }


def kind_of_repair(model: nn.Module, one_pass: bool) -> str:
    """Return how REPAIR works on a network."""
    if any(isinstance(module, nn.BatchNorm2d) for module in model.modules()):
        return "by recomputing the statistics of BatchNorm"
    return "one pass" if one_pass else "layer by layer"


def earlier(path: Path | None, settings: Mapping[str, Any], single: Sequence[float]) -> dict[str, Any]:
    """The results of a stored run with the same settings and the same first models."""
    if path is None or not path.exists():
        return {}
    results: dict[str, Any] = json.loads(path.read_text())["results"]
    known = results.get("single", [])
    if results.get("settings") != settings or known != list(single)[: len(known)]:
        return {}
    return results


def trained(cards: Sequence[Card]) -> dict[str, list[Any]]:
    """On how many images for how many epochs in which precision, by the models' cards; one value where all agree."""
    return {
        "images": sorted({card.data["train"] for card in cards}),
        "epochs": sorted({card.epochs for card in cards}),
        "precision": sorted({card.training["precision"] for card in cards}),
    }


def pair_cosines(models: Sequence[nn.Module], symmetry: align.Symmetry) -> dict[str, float]:
    """Cosine of the matrices and kernels of two networks, as they are and matched in their universe.

    Vectors do not count: the scales of norms, which begin at 1, make any two networks alike.
    """
    found = align.universe(models, symmetry)
    matrices = [
        {name: tensor if tensor.ndim > 1 else torch.zeros_like(tensor) for name, tensor in state.items()}
        for state in found.models
    ]
    still = [identity(symmetry)] * 2
    norms = [objective_of([each, each], still, symmetry) for each in matrices]
    scale = (norms[0] * norms[1]) ** 0.5
    ways = {"before": still, "after": found.permutations}
    return {when: objective_of(matrices, maps, symmetry) / scale for when, maps in ways.items()}


def guards(models: Sequence[nn.Module], initial: Sequence[nn.Module], symmetry: align.Symmetry) -> dict[str, Any]:
    """What matching finds in two trained networks, and in the same two before training."""
    pairs = {"trained": pair_cosines(models, symmetry), "untrained": pair_cosines(initial, symmetry)}
    return {"counted": "matrices", **pairs}


def line(count: int, way: str, row: Row) -> str:
    spread = f" ± {row['spread']:.4f}" if "spread" in row else ""
    return (
        f"n = {count:<2} {way:<30} accuracy {row['accuracy']:.4f}{spread}  loss {row['loss']:.3f}  "
        f"with REPAIR {row['repaired_accuracy']:.4f}  objective {row['objective']:.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_locations(parser)
    parser.add_argument("--arch", choices=sorted(ARCHITECTURES), default="mlp")
    parser.add_argument("--dataset", choices=DATASETS, default="mnist")
    parser.add_argument("--seeds", type=int, nargs="+", help="the models (default: those of 0 … 4 that are trained)")
    parser.add_argument("--counts", type=int, nargs="+", help="how many models to merge (default 2 … all)")
    parser.add_argument("--tries", type=int, default=3, help="random orders of MergeMany")
    parser.add_argument("--test-images", type=int)
    parser.add_argument("--repair-images", type=int)
    parser.add_argument("--one-pass", action="store_true", help="REPAIR all layers in one pass: much faster")
    parser.add_argument("--quick", action="store_true", help="two models, 1,000 images")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    place = functools.partial(model_directory, options.cache, options.arch, options.dataset)
    seeds = options.seeds or [seed for seed in range(5) if read_card(place(seed))]
    seeds = seeds[:2] if options.quick else seeds
    if len(seeds) < 2:
        parser.error(f"fewer than two models of {options.arch} on {options.dataset} are trained in {options.cache}")
    cards = [card for seed in seeds if (card := read_card(place(seed)))]
    for_test, for_repair, for_activations = (1000, 1000, 500) if options.quick else IMAGES[options.dataset]
    train, test = load_images(options.dataset, options.data, options.cache)
    test = test.head(options.test_images or for_test)
    batches = [images for images, _ in train.head(options.repair_images or for_repair).batches()]
    seen = [images for images, _ in train.head(for_activations).batches(100)]
    models = [load_model(options.arch, options.dataset, seed, options.cache) for seed in seeds]
    symmetry = align.symmetry(models[0], (batches[0][:2],))
    single = [evaluate(model, test)[0] for model in models]
    settings = {
        "test_images": len(test),
        "repair_images": sum(map(len, batches)),
        "activation_images": sum(map(len, seen)),
        "repair": kind_of_repair(models[0], options.one_pass),
    }
    known = earlier(options.json, settings, single)
    initial = [initial_model(options.arch, seed) for seed in seeds[:2]]
    pairs = known.get("guards") or guards(models[:2], initial, symmetry)
    results = {
        "single": single,
        "training": trained(cards),
        "guards": pairs | {"median_cosine": [card.guards["median_cosine"] for card in cards]},
        "settings": settings,
        **{count: rows for count, rows in known.items() if count.isdigit()},
    }
    print(describe())
    print(f"{options.arch} on {options.dataset}: single models {', '.join(f'{a:.4f}' for a in single)}", flush=True)
    for count in options.counts or range(2, len(models) + 1):
        rows = results.setdefault(str(count), {})
        for way, measure in ways(
            models[:count], symmetry, batches, seen, test, options.tries, options.one_pass
        ).items():
            if way not in rows:
                rows[way] = measure()
                record(options.json, results, seeds, added=bool(known))
            print(line(count, way, rows[way]), flush=True)


if __name__ == "__main__":
    main()
