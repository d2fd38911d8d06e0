"""The smaller tables of single-task merging, one question each.

    python -m benchmarks.single_task_extras [--only barriers seeds …] [--quick] [--json FILE]

barriers     loss and accuracy on the way between two networks, before and after matching
seeds        Git Re-Basin's spread over seeds, against two runs of C²M³
cycles       how far a model is from itself after a walk through pairwise maps
similarity   cosine and distance of weights, CKA and distance of outputs, before and after
subsets      some of the models matched together with all, and by themselves
ensembles    convex combinations sampled in the universe
federated    ten clients on digits, without Flower: plain averaging against aligned
transport    a task vector fine-tuned on one base, applied to another

Five MLPs of `benchmarks.zoo.vision` on MNIST and, for barriers, two ResNet20 with BatchNorm on CIFAR-10 where they are
trained. What the JSON file holds already and was not asked for with --only is kept. About ten minutes on one thread.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.extras import ensembles, federated, landscapes, matchings, transports
from benchmarks.machine import describe
from benchmarks.records import record
from benchmarks.single_task import loaded
from benchmarks.zoo.cards import add_locations
from benchmarks.zoo.images import Split, load_images
from benchmarks.zoo.vision import evaluate, load_model, model_directory
from merganser import align
from merganser.align.state import State

RESNET = "resnet20-bn"


@dataclass(frozen=True)
class Setting:
    """The models and images of a run, loaded when first asked for."""

    data: Path
    cache: Path
    quick: bool

    @cached_property
    def models(self) -> list[nn.Module]:
        return [load_model("mlp", "mnist", seed, self.cache) for seed in range(3 if self.quick else 5)]

    @cached_property
    def images(self) -> tuple[Split, Split]:
        train, test = load_images("mnist", self.data, self.cache)
        return (train.head(2000), test.head(1000)) if self.quick else (train.head(20_000), test)

    @cached_property
    def symmetry(self) -> align.Symmetry:
        return align.symmetry(self.models[0], (torch.zeros(2, 1, 28, 28),))

    @cached_property
    def universe(self) -> align.Universe:
        return align.universe(self.models, self.symmetry)

    def score(self, state: State) -> float:
        return evaluate(loaded(self.models[0], state), self.images[1])[0]


def barriers(setting: Setting) -> dict[str, Any]:
    found = {"MLP": landscapes.barriers(setting.models, setting.symmetry, setting.images[1])}
    trained = [model_directory(setting.cache, RESNET, "cifar10", seed) / "card.json" for seed in (0, 1)]
    if all(card.exists() for card in trained) and not setting.quick:
        models = [load_model(RESNET, "cifar10", seed, setting.cache) for seed in (0, 1)]
        train, test = load_images("cifar10", setting.data, setting.cache)
        fresh = [images for images, _ in train.head(1000).batches()]
        symmetry = align.symmetry(models[0], (fresh[0][:2],))
        found["ResNet20"] = landscapes.barriers(models, symmetry, test.head(1000), fresh, points=7)
    return found


def seeds(setting: Setting) -> dict[str, Any]:
    return matchings.seeds_against_none(
        setting.models, setting.symmetry, setting.score, seeds=3 if setting.quick else 10
    )


def cycles(setting: Setting) -> dict[str, Any]:
    return matchings.cycles(setting.models[:4], setting.symmetry)


def similarity(setting: Setting) -> dict[str, Any]:
    return landscapes.likeness(setting.universe, setting.models[0], "layers.2", setting.images[1])


def subsets(setting: Setting) -> dict[str, Any]:
    models = setting.models[:4]
    return matchings.subsets(align.universe(models, setting.symmetry), setting.score, range(2, len(models)))


def ensembling(setting: Setting) -> dict[str, Any]:
    return ensembles.table(setting.universe, setting.models[0], setting.images[1])


def federation(setting: Setting) -> dict[str, Any]:
    return federated.table((0,) if setting.quick else (0, 1, 2), count=2 if setting.quick else 5)


def transport(setting: Setting) -> dict[str, Any]:
    train, test = setting.images
    clothes = load_images("fashion_mnist", setting.data, setting.cache)
    tasks = {
        "digits turned by 90°": (transports.rotated(train), transports.rotated(test)),
        "Fashion-MNIST": (clothes[0].head(len(train)), clothes[1].head(len(test))),
    }
    return transports.table(setting.models[0], setting.models[1], setting.symmetry, tasks, test)


TABLES: dict[str, Callable[[Setting], dict[str, Any]]] = {
    "barriers": barriers,
    "seeds": seeds,
    "cycles": cycles,
    "similarity": similarity,
    "subsets": subsets,
    "ensembles": ensembling,
    "federated": federation,
    "transport": transport,
}


def lines(rows: Mapping[str, Any], title: str) -> Iterator[str]:
    """One line for each row of numbers, however deep it lies."""
    numbers = [f"{key} {value:.4g}" for key, value in rows.items() if isinstance(value, int | float)]
    if numbers:
        yield f"{title:<48} {'  '.join(numbers)}"
    for key, value in rows.items():
        if isinstance(value, Mapping):
            yield from lines(value, f"{title}: {key}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_locations(parser)
    parser.add_argument("--only", nargs="+", choices=tuple(TABLES), default=tuple(TABLES))
    parser.add_argument("--quick", action="store_true", help="three models, 1,000 images, fewer seeds")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    setting = Setting(options.data, options.cache, options.quick)
    kept = json.loads(options.json.read_text())["results"] if options.json and options.json.exists() else {}
    print(describe())
    for name in options.only:
        kept[name] = TABLES[name](setting)
        print("\n".join(lines(kept[name], name)), flush=True)
        tables = {key: kept[key] for key in TABLES if key in kept}
        record(options.json, tables, range(len(setting.models)), added=set(options.only) != set(TABLES))


if __name__ == "__main__":
    main()
