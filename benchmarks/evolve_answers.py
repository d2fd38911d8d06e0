"""Answers of merged MiniLM encoders to the test sentences of several tasks, computed once and kept.

The merges are all points of a grid of task-arithmetic weights, one weight for each expert: a search over this grid can
be replayed on the kept answers and asks exactly what it would have asked of live merges.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.zoo.text import Schedule, expert_directory, load_head, save_base, train
from benchmarks.zoo.text_tasks import TASKS, Sentences, encode, load_encoder, load_task
from merganser.evolve import Choices, Parameter, Space
from merganser.evolve.fitness import LiveMerge
from merganser.evolve.space import key

METHOD = "task_arithmetic"
BATCH = 64


@dataclass(frozen=True)
class Setting:
    """Which experts are merged, how many test sentences of each one's task are items, and the grid of weights."""

    experts: tuple[str, ...]
    sentences: int
    weights: tuple[float, ...]

    @property
    def space(self) -> Space:
        return Space((Parameter("weight", Choices(self.weights), self.experts),))

    @property
    def grid(self) -> list[dict[str, float]]:
        """Every candidate, in an order that makes any prefix a random sample of the grid."""
        points = [
            {f"weight.{name}": weight for name, weight in zip(self.experts, each, strict=True)}
            for each in itertools.product(self.weights, repeat=len(self.experts))
        ]
        return [points[i] for i in np.random.default_rng(0).permutation(len(points))]

    @property
    def file(self) -> str:
        """Answers of merges of the same experts to the same items are kept together, whatever the grid."""
        return f"evolve-{'-'.join(self.experts)}-{self.sentences}.npz"


@dataclass(frozen=True)
class Pool:
    """0/1 answers: `merges` (grid × items), `others` (models that are no merge × items), by the names in `models`.

    `features` are the experts' embeddings of the items (experts × items × width), `strata` the task of each item.
    """

    merges: np.ndarray
    others: np.ndarray
    models: tuple[str, ...]
    features: np.ndarray
    strata: tuple[str, ...]

    def endpoints(self, setting: Setting) -> np.ndarray:
        return self.others[[self.models.index(name) for name in setting.experts]]

    def calibration(self, setting: Setting) -> np.ndarray:
        """Answers of the models that are neither merged nor merges."""
        return self.others[[i for i, name in enumerate(self.models) if name not in setting.experts]]


@dataclass(frozen=True)
class Exam:
    """The test sentences of the experts' tasks, each answered through its own task's head."""

    parts: Mapping[str, Sentences]
    heads: Mapping[str, Mapping[str, Tensor]]

    def __len__(self) -> int:
        return sum(map(len, self.parts.values()))

    @property
    def strata(self) -> tuple[str, ...]:
        return tuple(name for name, sentences in self.parts.items() for _ in range(len(sentences)))

    def embedded(self, model: nn.Module) -> Tensor:
        return torch.cat([encode(model, sentences, BATCH) for sentences in self.parts.values()])

    def __call__(self, model: nn.Module, items: Sequence[int]) -> dict[str, list[float]]:
        answers = np.empty(len(items))
        for start, name in self._starts():
            sentences = self.parts[name]
            places = [p for p, item in enumerate(items) if start <= item < start + len(sentences)]
            if places:
                chosen = _chosen(sentences, [items[p] - start for p in places])
                answers[places] = self._right(name, encode(model, chosen, BATCH), chosen)
        return {"score": answers.tolist()}

    def graded(self, features: Tensor) -> np.ndarray:
        """Answers to all items from their embeddings."""
        return np.concatenate(
            [self._right(n, features[s : s + len(self.parts[n])], self.parts[n]) for s, n in self._starts()]
        )

    def _starts(self) -> Iterator[tuple[int, str]]:
        start = 0
        for name, sentences in self.parts.items():
            yield start, name
            start += len(sentences)

    def _right(self, name: str, features: Tensor, sentences: Sentences) -> np.ndarray:
        logits = features @ self.heads[name]["weight"].T + self.heads[name]["bias"]
        return (logits.argmax(1) == sentences.labels).double().numpy()


def _chosen(sentences: Sentences, indices: Sequence[int]) -> Sentences:
    parts = [sentences.slice(i, i + 1) for i in indices]
    tokens = np.concatenate([part.tokens for part in parts])
    return Sentences(tokens, np.cumsum([len(p.tokens) for p in parts]), torch.cat([part.labels for part in parts]))


def load_exam(setting: Setting, cache: Path, data: Path) -> Exam:
    """The items; experts that the zoo lacks are trained."""
    save_base(cache)
    tasks = {name: load_task(name, data, cache) for name in setting.experts}
    for task in tasks.values():
        train(task, 0, Schedule(), cache)
    parts = {name: task.test.slice(0, setting.sentences) for name, task in tasks.items()}
    return Exam(parts, {name: load_head(name, 0, cache) for name in setting.experts})


def live_merge(setting: Setting, cache: Path) -> LiveMerge:
    template = {
        "method": METHOD,
        "base": str(cache / "text" / "base"),
        "models": [{"path": str(expert_directory(cache, name))} for name in setting.experts],
    }
    return LiveMerge(load_encoder(cache / "text" / "base"), template, setting.experts, setting.space)


def models(cache: Path) -> dict[str, Path]:
    """What the zoo has besides merges: the base, every expert, and every expert after one epoch."""
    found = {"base": cache / "text" / "base"}
    for name in TASKS:
        found |= {name: expert_directory(cache, name), f"{name} early": expert_directory(cache, name) / "epoch1"}
    return {name: path for name, path in found.items() if (path / "model.safetensors").exists()}


def collect(setting: Setting, exam: Exam, cache: Path) -> Pool:
    """The pool, from the cache as far as it is there; kept after every few candidates."""
    path = cache / setting.file
    kept = dict(np.load(path)) if path.exists() else {}
    if "features" not in kept:
        kept |= _others(setting, exam, cache)
    rows = dict(zip(map(str, kept.get("keys", ())), kept.get("merges", ()), strict=True))
    missing = [values for values in setting.grid if key(values) not in rows]
    if missing:
        live = live_merge(setting, cache)
        began = time.monotonic()
        for number, values in enumerate(missing, 1):
            with torch.inference_mode():
                rows[key(values)] = exam.graded(exam.embedded(live.load(values)))
            if number % 10 == 0 or number == len(missing):
                kept |= {"keys": np.array(list(rows)), "merges": np.array(list(rows.values()))}
                draft = path.with_name(f"draft-{path.name}")
                np.savez_compressed(draft, **kept)
                draft.replace(path)
                print(f"{number} of {len(missing)} merges, {time.monotonic() - began:.0f} s", flush=True)
    merges = np.array([rows[key(values)] for values in setting.grid])
    names = tuple(str(name) for name in kept["models"])
    return Pool(merges, kept["others"], names, kept["features"].astype(np.float64), exam.strata)


def _others(setting: Setting, exam: Exam, cache: Path) -> dict[str, np.ndarray]:
    rows, features = {}, {}
    for name, directory in models(cache).items():
        embedded = exam.embedded(load_encoder(directory))
        rows[name] = exam.graded(embedded)
        if name in setting.experts:
            features[name] = embedded.numpy()
    return {
        "models": np.array(list(rows)),
        "others": np.array(list(rows.values())),
        "features": np.array([features[name] for name in setting.experts]),
    }
