"""The smaller tables of single-task merging, one question each.

    python -m benchmarks.single_task_extras [--arch resnet20-bn] [--only barriers seeds …] [--quick] [--json FILE]

barriers     loss and accuracy on the way between two networks, before and after matching
seeds        Git Re-Basin's spread over seeds, against two runs of C²M³
references   every model as the one that all others are matched to, against C²M³
orders       one model after another matched to the mean of those before, along the best order and as they come
starts       C²M³ from the propagated start, the identity, the barycentre and ten random points
planes       accuracy over the plane through three networks, before and after C²M³
cycles       how far a model is from itself after a walk through pairwise maps
similarity   cosine and distance of weights, CKA and distance of outputs, before and after
subsets      some of the models matched together with all, and by themselves
ensembles    convex combinations sampled in the universe, with REPAIR and without
federated    ten clients with small CNNs on CIFAR-10, without Flower: plain averaging against aligned
transport    a task vector fine-tuned on one base, applied to another

MLPs of `benchmarks.zoo.vision` on MNIST, ResNet20 with BatchNorm on CIFAR-10 (the first four tables and ensembles,
accuracies with BatchNorm statistics recomputed), wide ones or small CNNs on Fashion-MNIST (ensembles); those of the
seeds 0 … 4 that are trained. What the JSON file holds already and was not asked for with --only is kept. Twenty minutes
on one thread, half of them for the clients.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.extras import ensembles, federated, landscapes, matchings, transports
from benchmarks.machine import describe
from benchmarks.records import record
from benchmarks.single_task import loaded
from benchmarks.zoo.cards import add_locations, read_card
from benchmarks.zoo.images import Split, load_images
from benchmarks.zoo.vision import evaluate, load_model, model_directory
from merganser import align
from merganser.align.state import State

#: The set of images of an architecture, and how many of them are for training and for testing.
IMAGES = {
    "mlp": ("mnist", 20_000, 10_000),
    "cnn": ("fashion_mnist", 1_000, 10_000),
    "resnet20-bn": ("cifar10", 1_000, 2_000),
    "resnet20-bn-2x": ("cifar10", 1_000, 2_000),
}


@dataclass(frozen=True)
class Setting:
    """The models and images of a run, loaded when first asked for."""

    arch: str
    data: Path
    cache: Path
    quick: bool

    @cached_property
    def seeds(self) -> list[int]:
        """The models that are trained; all if none is, so that loading them says what is missing."""
        place = partial(model_directory, self.cache, self.arch, IMAGES[self.arch][0])
        wanted = range(3 if self.quick else 5)
        return [seed for seed in wanted if read_card(place(seed))] or list(wanted)

    @cached_property
    def models(self) -> list[nn.Module]:
        return [load_model(self.arch, IMAGES[self.arch][0], seed, self.cache) for seed in self.seeds]

    @cached_property
    def images(self) -> tuple[Split, Split]:
        dataset, for_training, for_test = IMAGES[self.arch]
        train, test = load_images(dataset, self.data, self.cache)
        return (train.head(1000), test.head(1000)) if self.quick else (train.head(for_training), test.head(for_test))

    @cached_property
    def fresh(self) -> list[Tensor]:
        """Images to recompute the statistics of BatchNorm on; none for networks without it."""
        if not any(isinstance(module, nn.BatchNorm2d) for module in self.models[0].modules()):
            return []
        return self.few

    @property
    def few(self) -> list[Tensor]:
        """Images to measure statistics of activations on."""
        return [images for images, _ in self.images[0].head(1_000).batches(250)]

    @cached_property
    def symmetry(self) -> align.Symmetry:
        images, _ = next(self.images[1].batches(2))
        return align.symmetry(self.models[0], (images,))

    @cached_property
    def universe(self) -> align.Universe:
        return align.universe(self.models, self.symmetry)

    def score(self, state: State) -> float:
        """Return the accuracy of a merge, with statistics of BatchNorm recomputed."""
        merged = loaded(self.models[0], state)
        return evaluate(align.reset_batch_norm(merged, self.fresh) if self.fresh else merged, self.images[1])[0]


def barriers(setting: Setting) -> dict[str, Any]:
    test, points = (setting.images[1].head(1000), 5) if setting.fresh else (setting.images[1], 11)
    name = "ResNet20" if setting.arch == "resnet20-bn" else "MLP"
    return {name: landscapes.barriers(setting.models, setting.symmetry, test, setting.fresh, points)}


def seeds(setting: Setting) -> dict[str, Any]:
    return matchings.seeds_against_none(
        setting.models, setting.symmetry, setting.score, seeds=3 if setting.quick else 10
    )


def references(setting: Setting) -> dict[str, Any]:
    return matchings.references(setting.universe, setting.score)


def orders(setting: Setting) -> dict[str, Any]:
    return matchings.orders(setting.models, setting.symmetry, setting.score)


def starts(setting: Setting) -> dict[str, Any]:
    return matchings.starts(setting.models, setting.symmetry, setting.score, draws=2 if setting.quick else 10)


def planes(setting: Setting) -> dict[str, Any]:
    resolution = 5 if setting.quick else 13
    return landscapes.planes(setting.models, setting.symmetry, setting.images[1].head(2000), resolution)


def cycles(setting: Setting) -> dict[str, Any]:
    return matchings.cycles(setting.models[:4], setting.symmetry)


def similarity(setting: Setting) -> dict[str, Any]:
    return landscapes.likeness(setting.universe, setting.models[0], "layers.2", setting.images[1])


def subsets(setting: Setting) -> dict[str, Any]:
    models = setting.models[:4]
    return matchings.subsets(align.universe(models, setting.symmetry), setting.score, range(2, len(models)))


def ensembling(setting: Setting) -> dict[str, Any]:
    return ensembles.table(setting.universe, setting.models[0], setting.few, setting.images[1])


def federation(setting: Setting) -> dict[str, Any]:
    train, test = load_images("cifar10", setting.data, setting.cache)
    if setting.quick:
        train, test = train.head(500), test.head(500)
        return {"images": 500, "runs": federated.table(train, test, repeats=1, epochs=(1,), rounds=2)}
    train, test = train.head(2000), test.head(2000)
    return {"images": len(train), "runs": federated.table(train, test, repeats=5)}


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
    "references": references,
    "orders": orders,
    "starts": starts,
    "planes": planes,
    "cycles": cycles,
    "similarity": similarity,
    "subsets": subsets,
    "ensembles": ensembling,
    "federated": federation,
    "transport": transport,
}
#: What is measured of each architecture.
TABLES_OF = {
    "mlp": tuple(TABLES),
    "cnn": ("ensembles",),
    "resnet20-bn": ("barriers", "seeds", "references", "orders", "ensembles"),
    "resnet20-bn-2x": ("ensembles",),
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
    parser.add_argument("--arch", choices=tuple(IMAGES), default="mlp")
    parser.add_argument(
        "--only", nargs="+", choices=tuple(TABLES), help="the tables (default: all of the architecture)"
    )
    parser.add_argument("--quick", action="store_true", help="three models, 1,000 images, fewer seeds")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    setting = Setting(options.arch, options.data, options.cache, options.quick)
    tables = TABLES_OF[setting.arch]
    names = options.only or tables
    kept = json.loads(options.json.read_text())["results"] if options.json and options.json.exists() else {}
    print(describe())
    for name in names:
        kept[name] = TABLES[name](setting)
        print("\n".join(lines(kept[name], name)), flush=True)
        results = {key: kept[key] for key in TABLES if key in kept}
        record(options.json, results, setting.seeds, added=set(names) != set(tables))


if __name__ == "__main__":
    main()
