"""Answers of merges to all items, computed once and kept.

The merges are all points of a grid of task-arithmetic weights, one weight for each expert: a search over this grid can
be replayed on the kept answers and asks exactly what it would have asked of live merges.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import nn

from merganser.evolve import SearchParameter, Space
from merganser.evolve.fitness import LiveMerge
from merganser.evolve.space import key

METHOD = "task_arithmetic"


@dataclass(frozen=True)
class Setting:
    """Which experts are merged, how many items each one's task has, and the grid of weights."""

    experts: tuple[str, ...]
    items: int
    weights: tuple[float, ...]

    @property
    def space(self) -> Space:
        return Space({"weight": SearchParameter(choices=self.weights, per="model")}, models=self.experts)

    def point(self, weights: Sequence[float]) -> dict[str, float]:
        return {f"weight.{name}": weight for name, weight in zip(self.experts, weights, strict=True)}

    @property
    def grid(self) -> list[dict[str, float]]:
        """Every candidate, in an order that makes any prefix a random sample of the grid."""
        points = [self.point(each) for each in itertools.product(self.weights, repeat=len(self.experts))]
        return [points[i] for i in np.random.default_rng(0).permutation(len(points))]

    @property
    def file(self) -> str:
        """Answers of merges of the same experts to the same items are kept together, whatever the grid."""
        return f"evolve-{'-'.join(self.experts)}-{self.items}.npz"


class Exam(Protocol):
    """Models of one kind, and items they can be asked."""

    @property
    def strata(self) -> tuple[str, ...]:
        """The task of each item."""
        ...

    def asked(self, model: nn.Module, items: Sequence[int]) -> np.ndarray:
        """1 for each of the items that the model answers rightly, else 0."""
        ...

    def answers(self, model: nn.Module) -> np.ndarray:
        """The same for all items."""
        ...

    def features(self, model: nn.Module) -> np.ndarray:
        """Items × width: the model's embeddings of the items."""
        ...

    def live(self) -> LiveMerge: ...

    def others(self) -> Iterator[tuple[str, nn.Module]]:
        """Models that are no merges, among them `base` and the experts; each only until the next one."""
        ...


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


def measure_single(setting: Setting, pool: Pool) -> dict[str, dict[str, float]]:
    """Share of each task's items that the base and every expert answer rightly, before anything is merged."""
    tasks = np.array(pool.strata)
    rows = {name: pool.others[pool.models.index(name)] for name in ("base", *setting.experts)}
    return {name: {task: float(row[tasks == task].mean()) for task in setting.experts} for name, row in rows.items()}


def collect(setting: Setting, exam: Exam, cache: Path) -> Pool:
    """The pool, from the cache as far as it is there; kept after every few candidates."""
    path = cache / setting.file
    kept = dict(np.load(path)) if path.exists() else {}
    if "features" not in kept:
        kept |= _others(setting, exam)
        _keep(path, kept)
    rows = dict(zip(map(str, kept.get("keys", ())), kept.get("merges", ()), strict=True))
    missing = [values for values in setting.grid if key(values) not in rows]
    if missing:
        live = exam.live()
        began = time.monotonic()
        for number, values in enumerate(missing, 1):
            with torch.inference_mode():
                rows[key(values)] = exam.answers(live.load(values))
            if number % 5 == 0 or number == len(missing):
                kept |= {"keys": np.array(list(rows)), "merges": np.array(list(rows.values()))}
                _keep(path, kept)
                print(f"{number} of {len(missing)} merges, {time.monotonic() - began:.0f} s", flush=True)
    merges = np.array([rows[key(values)] for values in setting.grid])
    names = tuple(str(name) for name in kept["models"])
    return Pool(merges, kept["others"], names, kept["features"].astype(np.float64), exam.strata)


def _keep(path: Path, kept: dict[str, np.ndarray]) -> None:
    draft = path.with_name(f"draft-{path.name}")
    np.savez_compressed(draft, **kept)
    draft.replace(path)


def _others(setting: Setting, exam: Exam) -> dict[str, np.ndarray]:
    rows, features = {}, {}
    for name, model in exam.others():
        with torch.inference_mode():
            rows[name] = exam.answers(model)
            if name in setting.experts:
                features[name] = exam.features(model)
        print(f"{name}: {rows[name].mean():.3f}", flush=True)
    return {
        "models": np.array(list(rows)),
        "others": np.array(list(rows.values())),
        "features": np.array([features[name] for name in setting.experts]),
    }
