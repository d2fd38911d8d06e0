"""What `benchmarks.adaptive` works on: a library of text experts, their heads, sentences, and the experts' scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from benchmarks.zoo.text import Schedule, expert_directory, load_head, save_base, train
from benchmarks.zoo.text_tasks import TASKS, Sentences, load_encoder, load_task
from merganser.library import Library
from merganser.modules.activations import pool
from merganser.modules.inputs import Inputs
from merganser.routing import AdaptiveModel
from merganser.routing.baselines import Baseline

#: Enough for every set that comes up: what is measured is the method, not how a small cache thrashes.
CACHE = 2 << 30
B = TypeVar("B", bound=Baseline)


@dataclass(frozen=True)
class Data:
    """By task: batches of test sentences, of validation sentences to choose settings on, and of others to fit routers
    on. Nothing is chosen or fitted on test sentences."""

    test: Mapping[str, list[tuple[Inputs, Tensor]]]
    tuning: Mapping[str, list[tuple[Inputs, Tensor]]]
    support: Mapping[str, list[Inputs]]


@dataclass(frozen=True)
class Sizes:
    """Sentences of each task. The first `skipped` test sentences were looked at while defaults were chosen."""

    test: int = 96
    tuning: int = 48
    support: int = 100
    skipped: int = 64


@dataclass(frozen=True)
class Setting:
    """The library with its heads, the sentences, and the accuracies of the fine-tuned experts."""

    library: Library
    heads: Mapping[str, Mapping[str, Tensor]]
    encoder: nn.Module
    data: Data
    reference: Mapping[str, float]

    def model(self, **options: Any) -> AdaptiveModel:
        options = {"cache_bytes": CACHE} | options
        return AdaptiveModel(self.encoder, self.library, self.heads, features=features, **options)

    def baseline(self, kind: type[B], **options: Any) -> B:
        return kind(self.encoder, self.library, self.heads, features=features, **options)


def features(output: Any, inputs: Inputs) -> Tensor:
    return pool(output.last_hidden_state, "mean", inputs.mask)


def batches(sentences: Sentences, size: int = 32) -> list[tuple[Inputs, Tensor]]:
    return [(Inputs((), sentences.padded(chosen)), sentences.labels[chosen]) for chosen in sentences.batches(size)]


def prepare(cache: Path, data: Path, names: Sequence[str], sizes: Sizes) -> Setting:
    library = build(cache, data, names)
    heads = {task: load_head(task, 0, cache) for task in names}
    sentences = load(cache, data, names, sizes)
    encoder = load_encoder(cache / "text" / "base")
    return Setting(library, heads, encoder, sentences, fine_tuned(sentences, cache, heads))


def load(cache: Path, data: Path, names: Sequence[str], sizes: Sizes) -> Data:
    tasks = {name: load_task(name, data, cache) for name in names}
    stop = sizes.support + sizes.tuning
    return Data(
        {name: batches(task.test.slice(sizes.skipped, sizes.skipped + sizes.test)) for name, task in tasks.items()},
        {name: batches(task.validation.slice(sizes.support, stop)) for name, task in tasks.items()},
        {name: [x for x, _ in batches(task.validation.slice(0, sizes.support))] for name, task in tasks.items()},
    )


def training_sentences(cache: Path, data: Path, names: Sequence[str], count: int) -> dict[str, list[Inputs]]:
    """The first training sentences of each task."""
    tasks = {name: load_task(name, data, cache) for name in names}
    return {name: [x for x, _ in batches(task.train.slice(0, count))] for name, task in tasks.items()}


def fine_tuned(data: Data, cache: Path, heads: Mapping[str, Mapping[str, Tensor]]) -> dict[str, float]:
    """The experts as they were trained, each with its own head: what accuracies are normalised by."""
    found = {}
    for task, parts in data.test.items():
        encoder = load_encoder(expert_directory(cache, task))
        right = total = 0
        for x, labels in parts:
            with torch.no_grad():
                z = features(x.run(encoder), x)
            right += int(((z @ heads[task]["weight"].T + heads[task]["bias"]).argmax(1) == labels).sum())
            total += len(labels)
        found[task] = right / total
    return found


def build(cache: Path, data: Path, names: Sequence[str]) -> Library:
    """The experts' library, kept in the cache."""
    path = cache / "libraries" / ("text" if tuple(names) == TASKS else f"text-{'-'.join(names)}")
    save_base(cache)
    for name in names:
        train(load_task(name, data, cache), 0, Schedule(), cache)
    if path.exists():
        return Library(path)
    return Library.build(cache / "text" / "base", {t: expert_directory(cache, t) for t in names}, path)
