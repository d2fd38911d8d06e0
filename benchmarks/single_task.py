"""Networks trained apart on one task, merged: the thesis' table at this scale.

    python -m benchmarks.single_task [--arch mlp] [--dataset mnist] [--seeds 0 1 2 3 4] [--json FILE]

Takes models of `benchmarks.zoo.vision` and prints test accuracy and loss of the plain mean, of every model matched to
the first, of MergeMany (mean and spread over seeds: it visits models in random order) and of C²M³, each with and
without REPAIR against the mapped endpoints, for n = 2 … all models. About two minutes for five MLPs.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.machine import describe
from benchmarks.records import record
from benchmarks.zoo.cards import add_locations
from benchmarks.zoo.images import Split, load_images
from benchmarks.zoo.vision import evaluate, load_model
from merganser import align

REPAIR_BATCHES = 20


def loaded(template: nn.Module, state: Mapping[str, Tensor]) -> nn.Module:
    model = copy.deepcopy(template)
    model.load_state_dict(dict(state))
    return model.eval()


def scores(found: align.Universe, template: nn.Module, train: Split, test: Split) -> dict[str, float]:
    """Accuracy and loss of the merge, and its accuracy after REPAIR against the endpoints in the same space."""
    merged = loaded(template, found.merged())
    accuracy, loss = evaluate(merged, test)
    batches = [images for images, _ in itertools.islice(train.batches(), REPAIR_BATCHES)]
    endpoints = [found.to_universe(i) for i in range(len(found.permutations))]
    repaired, repaired_loss = evaluate(align.repair(merged, endpoints, batches), test)
    return {
        "accuracy": accuracy,
        "loss": loss,
        "repaired_accuracy": repaired,
        "repaired_loss": repaired_loss,
        "objective": found.objective,
        "cycle_error": found.cycle_error(),
    }


def table(models: list[nn.Module], train: Split, test: Split, tries: int) -> dict[str, Any]:
    """Every way to merge these models."""
    example = next(iter(test.batches()))[0][:2]
    symmetry = align.symmetry(models[0], (example,))
    nothing = align.match_to_reference(models, symmetry.restrict(), 0)
    many = [scores(align.merge_many(models, symmetry, seed=s), models[0], train, test) for s in range(tries)]
    means = {key: statistics.mean(run[key] for run in many) for key in many[0]}
    means["spread"] = statistics.pstdev(run["accuracy"] for run in many)
    return {
        "plain mean": scores(nothing, models[0], train, test),
        "match to the first": scores(align.match_to_reference(models, symmetry, 0), models[0], train, test),
        "MergeMany": means,
        "C²M³": scores(align.universe(models, symmetry), models[0], train, test),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_locations(parser)
    parser.add_argument("--arch", default="mlp")
    parser.add_argument("--dataset", default="mnist")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--tries", type=int, default=3, help="random orders of MergeMany")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    train, test = load_images(options.dataset, options.data, options.cache)
    models = [load_model(options.arch, options.dataset, seed, options.cache) for seed in options.seeds]
    single = [evaluate(model, test)[0] for model in models]
    print(describe())
    print(f"{options.arch} on {options.dataset}: single models {', '.join(f'{a:.4f}' for a in single)}")
    results: dict[str, Any] = {"single": single}
    for n in range(2, len(models) + 1):
        results[str(n)] = table(models[:n], train, test, options.tries)
        for way, row in results[str(n)].items():
            spread = f" ± {row['spread']:.4f}" if "spread" in row else ""
            print(
                f"n = {n}  {way:<20} accuracy {row['accuracy']:.4f}{spread}  loss {row['loss']:.3f}  "
                f"with REPAIR {row['repaired_accuracy']:.4f}  objective {row['objective']:.1f}",
                flush=True,
            )
    record(options.json, results, options.seeds)


if __name__ == "__main__":
    main()
