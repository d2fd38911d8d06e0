"""Networks trained apart on one task, merged: the thesis' table at this scale.

    python -m benchmarks.single_task [--arch mlp] [--dataset mnist] [--seeds 0 1 2 3 4] [--counts 2 3 5] [--json FILE]

Takes models of `benchmarks.zoo.vision` and prints test accuracy and loss of the plain mean, of every model matched to
the first by weights and by activations, of MergeMany (mean and spread over seeds: it visits models in random order) and
of C²M³ on weights and on activations, each with and without REPAIR against the mapped endpoints, for growing numbers of
models. Networks with BatchNorm get recomputed statistics for REPAIR. A row that the JSON file holds already is kept, so
that a run can be extended by more models. About two minutes for five MLPs, half an hour for three ResNet20 on one
thread.

`guards` in the results say whether the networks have learned anything that matching could find: the median cosine of
initial and trained weights of every network, from its card, and the cosine of two networks before and after C²M³, of
the first two as they are and as they were before training.
"""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.machine import describe
from benchmarks.records import record
from benchmarks.zoo.architectures import ARCHITECTURES
from benchmarks.zoo.cards import add_locations, read_card
from benchmarks.zoo.images import DATASETS, Split, load_images
from benchmarks.zoo.vision import evaluate, initial_model, load_model, model_directory
from merganser import align
from merganser.align.permutations import identity
from merganser.align.solver import objective_of
from merganser.align.state import states_of

#: By default as many images as the processor affords; the splits are shuffled, so that the first ones are a sample.
IMAGES = {"mnist": (10_000, 10_000), "fashion_mnist": (10_000, 10_000), "cifar10": (5_000, 2_000)}
#: Images on which activations are compared.
ACTIVATION_IMAGES = 2_000


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
) -> dict[str, float]:
    """Accuracy and loss of the merge, and both after REPAIR."""
    merged = loaded(template, found.merged())
    accuracy, loss = evaluate(merged, test)
    repaired_accuracy, repaired_loss = evaluate(repaired(found, merged, batches, one_pass), test)
    return {
        "accuracy": accuracy,
        "loss": loss,
        "repaired_accuracy": repaired_accuracy,
        "repaired_loss": repaired_loss,
        "objective": found.objective,
        "cycle_error": found.cycle_error(),
    }


def means(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Means of scores over seeds and, of several, the standard deviation of both accuracies."""
    found = {key: statistics.mean(run[key] for run in runs) for key in runs[0]}
    if len(runs) > 1:
        found["spread"] = statistics.pstdev(run["accuracy"] for run in runs)
        found["repaired_spread"] = statistics.pstdev(run["repaired_accuracy"] for run in runs)
    return found | {"runs": len(runs)}


def table(
    models: Sequence[nn.Module],
    symmetry: align.Symmetry,
    batches: Sequence[Tensor],
    test: Split,
    tries: int,
    one_pass: bool = False,
    known: Mapping[str, dict[str, float]] | None = None,
) -> dict[str, dict[str, float]]:
    """Merge these models in every way, except those whose scores are known."""

    def scored(found: align.Universe) -> dict[str, float]:
        return scores(found, models[0], batches, test, one_pass)

    seen = first_images(batches, ACTIVATION_IMAGES)
    to_first = functools.partial(align.match_to_reference, models, symmetry, 0)
    ways: dict[str, Callable[[], dict[str, float]]] = {
        "plain mean": lambda: scored(unmoved(models, symmetry)),
        "match to the first": lambda: scored(to_first(start="identity", tries=1)),
        "match activations to the first": lambda: scored(to_first(method="activations", batches=seen)),
        "MergeMany": lambda: means([scored(align.merge_many(models, symmetry, seed=seed)) for seed in range(tries)]),
        "C²M³": lambda: scored(align.universe(models, symmetry)),
        "C²M³ on activations": lambda: scored(align.universe(models, symmetry, batches=seen)),
    }
    known = known or {}
    return {way: known[way] if way in known else measure() for way, measure in ways.items()}


def first_images(batches: Sequence[Tensor], count: int) -> list[Tensor]:
    """Return the batches up to so many images."""
    starts = itertools.accumulate((len(batch) for batch in batches), initial=0)
    return [batch[: count - start] for batch, start in zip(batches, starts, strict=False) if start < count]


def earlier(path: Path | None, settings: Mapping[str, Any], single: Sequence[float]) -> dict[str, Any]:
    """The tables of a stored run with the same settings and the same first models."""
    if path is None or not path.exists():
        return {}
    results = json.loads(path.read_text())["results"]
    known = results.get("single", [])
    if results.get("settings") != settings or known != list(single)[: len(known)]:
        return {}
    return {key: value for key, value in results.items() if key.isdigit()}


def trained(directories: Sequence[Path]) -> dict[str, list[int]]:
    """On how many images for how many epochs, by the models' cards; one number where all agree."""
    cards = [card for card in map(read_card, directories) if card]
    return {
        "images": sorted({card.data["train"] for card in cards}),
        "epochs": sorted({card.epochs for card in cards}),
    }


def pair_cosines(models: Sequence[nn.Module], symmetry: align.Symmetry) -> dict[str, float]:
    """Cosine of the weights of two networks, as they are and matched in their universe."""
    first, second = states_of(models, symmetry)
    still = [identity(symmetry)] * 2
    norms = [objective_of([each, each], still, symmetry) for each in (first, second)]
    scale = (norms[0] * norms[1]) ** 0.5
    before = objective_of([first, second], still, symmetry)
    return {"before": before / scale, "after": align.universe(models, symmetry).objective / scale}


def guards(
    models: Sequence[nn.Module], symmetry: align.Symmetry, directories: Sequence[Path], initial: Sequence[nn.Module]
) -> dict[str, Any]:
    """How far training moved the networks, and what matching finds in trained and untrained ones."""
    cards = [card for card in map(read_card, directories) if card]
    return {
        "median_cosine": [card.guards["median_cosine"] for card in cards],
        "trained": pair_cosines(models[:2], symmetry),
        "untrained": pair_cosines(initial, symmetry),
    }


def line(count: int, way: str, row: Mapping[str, float]) -> str:
    spread = f" ± {row['spread']:.4f}" if "spread" in row else ""
    return (
        f"n = {count:<2} {way:<20} accuracy {row['accuracy']:.4f}{spread}  loss {row['loss']:.3f}  "
        f"with REPAIR {row['repaired_accuracy']:.4f}  objective {row['objective']:.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_locations(parser)
    parser.add_argument("--arch", choices=sorted(ARCHITECTURES), default="mlp")
    parser.add_argument("--dataset", choices=DATASETS, default="mnist")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--counts", type=int, nargs="+", help="how many models to merge (default 2 … all)")
    parser.add_argument("--tries", type=int, default=3, help="random orders of MergeMany")
    parser.add_argument("--test-images", type=int)
    parser.add_argument("--repair-images", type=int)
    parser.add_argument("--one-pass", action="store_true", help="REPAIR all layers in one pass: much faster")
    parser.add_argument("--quick", action="store_true", help="two models, 1,000 images")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for_test, for_repair = (1000, 1000) if options.quick else IMAGES[options.dataset]
    seeds = options.seeds[:2] if options.quick else options.seeds
    train, test = load_images(options.dataset, options.data, options.cache)
    test = test.head(options.test_images or for_test)
    batches = [images for images, _ in train.head(options.repair_images or for_repair).batches()]
    models = [load_model(options.arch, options.dataset, seed, options.cache) for seed in seeds]
    symmetry = align.symmetry(models[0], (batches[0][:2],))
    single = [evaluate(model, test)[0] for model in models]
    settings = {
        "test_images": len(test),
        "repair_images": sum(len(batch) for batch in batches),
        "repair": "one pass" if options.one_pass else "layer by layer",
    }
    directories = [model_directory(options.cache, options.arch, options.dataset, seed) for seed in seeds]
    training = trained(directories)
    guarded = guards(models, symmetry, directories, [initial_model(options.arch, seed) for seed in seeds[:2]])
    print(describe())
    print(f"{options.arch} on {options.dataset}: single models {', '.join(f'{a:.4f}' for a in single)}")
    tables = earlier(options.json, settings, single)
    kept = bool(tables)
    for count in options.counts or range(2, len(models) + 1):
        tables[str(count)] = table(
            models[:count], symmetry, batches, test, options.tries, options.one_pass, tables.get(str(count))
        )
        for way, row in tables[str(count)].items():
            print(line(count, way, row), flush=True)
        results = {"single": single, "training": training, "guards": guarded, "settings": settings, **tables}
        record(options.json, results, seeds, added=kept)


if __name__ == "__main__":
    main()
