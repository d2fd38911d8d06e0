"""What `benchmarks.adaptive` works on: a library of text experts, their heads, sentences, and the experts' answers."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from benchmarks.zoo.text import Schedule, expert_directory, load_head, save_base, train
from benchmarks.zoo.text_layers import layers_from, load_top_layers, with_states
from benchmarks.zoo.text_tasks import Sentences, load_task, right
from merganser.library import Library
from merganser.modules.activations import pool
from merganser.modules.inputs import Inputs
from merganser.routing import AdaptiveModel
from merganser.routing.baselines import Baseline
from merganser.routing.heads import NamedHead

#: Tasks that ask the same question, and its answers.
POLARITY = frozenset({"mr", "sst2", "cr", "mpqa"})
ANSWERS = ("negative", "positive")
#: Enough for every set that comes up: what is measured is the method, not how a small cache thrashes.
CACHE = 2 << 30
B = TypeVar("B", bound=Baseline)
T = TypeVar("T")
Labelled = list[tuple[Inputs, Tensor]]


@dataclass(frozen=True)
class Data:
    """By task: batches of test sentences, of validation sentences to choose settings on, of others to fit routers and
    gates on, and of training sentences for the limit of all routers, which are many and read when they are needed.
    Nothing is chosen or fitted on test sentences."""

    test: Mapping[str, Labelled]
    tuning: Mapping[str, Labelled]
    support: Mapping[str, list[Inputs]]
    training: Callable[[], Mapping[str, list[Inputs]]]


@dataclass(frozen=True)
class Sizes:
    """Sentences of each task."""

    test: int
    tuning: int
    support: int
    training: int

    @classmethod
    def of(cls, tasks: int) -> Sizes:
        """Share the same number of sentences among any number of tasks."""
        return cls(*(-(-whole // tasks) for whole in (2080, 320, 800, 8000)))


@dataclass(frozen=True, eq=False)
class Setting:
    """The library with its heads, the trained layers of the base, the sentences, and which of the test sentences the
    fine-tuned experts answer right. `known` keeps what several contenders compute alike."""

    library: Library
    heads: Mapping[str, Mapping[str, Tensor]]
    encoder: nn.Module
    data: Data
    experts: Mapping[str, Tensor]
    known: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    def once(self, key: Hashable, compute: Callable[[], T]) -> T:
        """Compute something the first time that it is asked for."""
        if key not in self.known:
            self.known[key] = compute()
        found: T = self.known[key]
        return found

    def named_heads(self) -> dict[str, Any]:
        """Return the heads; those of the polarity tasks with the names of their classes."""
        return {task: NamedHead(head, ANSWERS) if task in POLARITY else head for task, head in self.heads.items()}

    def model(self, **options: Any) -> AdaptiveModel:
        options = {"cache_bytes": CACHE} | options
        return AdaptiveModel(self.encoder, self.library, self.named_heads(), features=features, **options)

    def baseline(self, kind: type[B], **options: Any) -> B:
        return kind(self.encoder, self.library, self.named_heads(), features=features, **options)


def same_question(task: str, other: str) -> bool:
    """Return whether answers to one task count for the other: polarity tasks have the same two classes."""
    return task == other or (task in POLARITY and other in POLARITY)


def features(output: Any, inputs: Inputs) -> Tensor:
    return pool(output.last_hidden_state, "mean", inputs.mask)


def batches(sentences: Sentences, size: int = 32) -> Labelled:
    return [(Inputs((), sentences.padded(chosen)), sentences.labels[chosen]) for chosen in sentences.batches(size)]


def prepare(cache: Path, data: Path, names: Sequence[str], sizes: Sizes, seed: int = 0) -> Setting:
    """Load the experts of a seed, trained if they are missing, and a library of them that is kept in the cache."""
    save_base(cache)
    tasks = {name: load_task(name, data, cache) for name in names}
    for task in tasks.values():
        train(task, seed, Schedule(), cache)
    heads = {name: load_head(name, seed, cache) for name in names}
    test, tuning, support = {}, {}, {}
    experts = {}
    for name, task in tasks.items():
        answered = with_states(task.test.slice(0, sizes.test))
        held_out = with_states(task.validation.slice(0, sizes.support + sizes.tuning))
        test[name] = batches(answered)
        support[name] = [x for x, _ in batches(held_out.slice(0, sizes.support), 10)]
        tuning[name] = batches(held_out.slice(sizes.support, len(held_out)))
        layers = layers_from(_weights(expert_directory(cache, name, seed)))
        order = torch.cat([torch.from_numpy(chosen) for chosen in answered.batches(32)])
        experts[name] = right(layers, heads[name], answered)[order]

    def training() -> Mapping[str, list[Inputs]]:
        read = {name: with_states(task.train.slice(0, sizes.training)) for name, task in tasks.items()}
        return {name: [x for x, _ in batches(sentences)] for name, sentences in read.items()}

    library = build(cache, names, seed)
    return Setting(library, heads, load_top_layers(), Data(test, tuning, support, training), experts)


def _weights(directory: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(directory / "model.safetensors")


def build(cache: Path, names: Sequence[str], seed: int) -> Library:
    """The experts' library, kept in the cache."""
    path = cache / "libraries" / f"text-{'-'.join(names)}"[:120] / f"{len(names)}-seed{seed}"
    if path.exists():
        return Library(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    return Library.build(cache / "text" / "base", {t: expert_directory(cache, t, seed) for t in names}, path)
