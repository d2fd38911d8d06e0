"""Prepare a search: hold out test items, calibrate the IRT on the rest, choose the items to ask candidates.

Disjoint by construction: the test items are removed first, and everything else uses only the pool.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from merganser.errors import InputError, MerganserError
from merganser.evolve import subsets
from merganser.evolve.arrays import Array, Indices
from merganser.evolve.blending import (
    ENOUGH_MODELS,
    cross_validated_bias_variance_c,
    cross_validated_c,
    leave_out,
)
from merganser.evolve.estimators import Estimator, adaptive_c, bias_variance_c, naive, validation_error
from merganser.evolve.irt.model import IRT
from merganser.evolve.store import Store
from merganser.evolve.subsets import Subset
from merganser.evolve.tasks import StudyTask
from merganser.strict_json import parse_json


@dataclass(frozen=True)
class Calibration:
    """What is known about a task's items before a study.

    Attributes:
        answers: Answers of other models, shape (models, items).
        irt: A fitted IRT of the items, instead of answers.
        embeddings: For representation clustering, the endpoints' embeddings of the items.

    Example:
        >>> import numpy as np
        >>> known = mg.evolve.Calibration(answers=np.random.default_rng(0).integers(0, 2, (12, 40)).astype(float))
    """

    answers: Array | None = None
    irt: IRT | None = None
    embeddings: tuple[Array, ...] | None = None

    @property
    def items(self) -> int | None:
        """Return the number of items of the answers or the IRT."""
        if self.irt is not None:
            return len(self.irt.items)
        return None if self.answers is None else int(np.atleast_2d(self.answers).shape[1])


def check_answers(answers: ArrayLike) -> Array:
    """Return answers of shape (models, items) in [0, 1]; NaN where an answer is missing."""
    try:
        found = np.atleast_2d(np.asarray(answers, dtype=np.float64))
    except (TypeError, ValueError):
        raise InputError("answers are numbers, models × items") from None
    if found.ndim != 2 or 0 in found.shape:
        raise InputError(f"answers are a matrix, models × items, not an array of shape {found.shape}")
    known = found[~np.isnan(found)]
    if not len(known) or known.min() < 0 or known.max() > 1:
        span = f"found {known.min():g} to {known.max():g}" if len(known) else "all are missing"
        raise InputError(f"answers lie in [0, 1]; {span}")
    return found


def check(name: str, task: StudyTask, known: Calibration) -> None:
    """Check that the calibration covers the task's items and suffices for its extractor."""
    where = f"task {name!r}"
    if known.answers is not None:
        try:
            check_answers(known.answers)
        except InputError as error:
            raise InputError(f"{where}: calibration: {error}") from None
    check_items(name, task, known)
    if task.extractor == "representation":
        if known.embeddings is None:
            raise InputError(f"{where}: the representation extractor needs embeddings of the items")
        if wrong := [each.shape for each in known.embeddings if each.ndim != 2 or len(each) != task.items]:
            raise InputError(f"{where}: embeddings are {task.items} items × width, not of shape {wrong[0]}")


def check_items(name: str, task: StudyTask, known: Calibration) -> None:
    """Check that the calibration covers all items of the task, or all but those of its test file."""
    if known.items not in (None, task.items, searched := _select_searched(task)):
        wanted = str(task.items) if searched == task.items else f"{searched}, or {task.items} with those of the test"
        raise InputError(f"task {name!r}: the calibration covers {known.items} items, but the task has {wanted}")


def _select_searched(task: StudyTask) -> int:
    """Return the items before the test items if those come last, as from a test file; else all."""
    last = range(task.pool, task.items)
    return task.pool if task.test_items is not None and sorted(task.test_items) == list(last) else task.items


@dataclass(frozen=True)
class Split:
    """Item numbers of a task for fitness and IRT (`pool`), and for the final score (`test`)."""

    pool: Indices
    test: Indices


@dataclass(frozen=True)
class Prepared:
    """A task ready for the search. `subset` indexes the pool; `items` are the same as item numbers of the task."""

    split: Split
    subset: Subset
    estimator: Estimator

    @property
    def items(self) -> list[int]:
        return [int(i) for i in self.split.pool[self.subset.items]]


def split(name: str, task: StudyTask, seed: int) -> Split:
    """Return a random split that depends only on the seed and the task's name; or the one that the task lists."""
    if task.test_items is not None:
        test = np.sort(np.array(task.test_items, dtype=np.intp))
        return Split(np.setdiff1d(np.arange(task.items), test), test)
    generator = np.random.default_rng([seed, zlib.crc32(name.encode())])
    order = generator.permutation(task.items)
    return Split(np.sort(order[: task.pool]), np.sort(order[task.pool :]))


def prepare(
    name: str,
    task: StudyTask,
    seed: int,
    endpoints: Mapping[str, ArrayLike] | None,
    calibration: Calibration | None = None,
    *,
    split_seed: int = 0,
) -> Prepared:
    """Prepare a task; `endpoints` are the endpoints' answers to the pool by label, needed for IRT.

    `split_seed` is the seed of the test items, `seed` that of the subset.
    """
    parts = split(name, task, split_seed)
    known = calibration or Calibration()
    rows = np.array([np.asarray(a, dtype=np.float64) for a in (endpoints or {}).values()])
    if task.needs_irt and not len(rows):
        raise InputError(f"task {name!r}: {task.estimator} needs the endpoints' answers to all items of the pool")
    irt = _fit_calibrated(task, parts, rows, known, seed) if task.needs_irt else None
    size = task.subset or len(parts.pool)
    subset = _extract(task, parts, size, irt, known, seed)
    if irt is None or task.estimator == "naive":
        return Prepared(parts, subset, Estimator())
    abilities = irt.abilities[len(irt.abilities) - len(rows) :]
    c = _choose_blend(task, parts, irt, rows, subset, known, seed)
    return Prepared(parts, subset, Estimator(task.estimator, irt, abilities, c))


def _gather_others(parts: Split, known: Calibration) -> Array:
    """Return answers of calibration models to the pool; without any, no rows."""
    if known.answers is None:
        return np.empty((0, len(parts.pool)))
    return np.atleast_2d(known.answers)[:, parts.pool]


def _fit_calibrated(task: StudyTask, parts: Split, rows: Array, known: Calibration, seed: int) -> IRT:
    """Return an IRT of the pool whose last abilities are the endpoints'."""
    if known.irt is not None:
        items = known.irt.select(parts.pool)
        abilities = np.array([items.ability(row).mean for row in rows])
        return IRT(abilities, items.items, items.prior)
    from merganser.evolve.irt.fitting import fit

    return fit(np.concatenate([_gather_others(parts, known), rows]), dimensions=task.dimensions, seed=seed)


def _extract(task: StudyTask, parts: Split, size: int, irt: IRT | None, known: Calibration, seed: int) -> Subset:
    if task.extractor == "stratified":
        assert isinstance(task.strata, tuple)
        return subsets.stratified([task.strata[i] for i in parts.pool], size, seed=seed)
    if task.extractor == "irt":
        assert irt is not None
        return subsets.irt_clustering(irt.items, size, seed=seed)
    if task.extractor == "representation":
        assert known.embeddings is not None
        return subsets.representation_clustering([e[parts.pool] for e in known.embeddings], size, seed=seed)
    return subsets.random(len(parts.pool), size, seed=seed)


def _choose_blend(
    task: StudyTask, parts: Split, irt: IRT, rows: Array, subset: Subset, known: Calibration, seed: int
) -> float:
    """Return c; a given IRT saw no endpoint, a fitted one is fitted without each model."""
    if not isinstance(task.c, str):
        return float(task.c)
    adaptive = task.c == "adaptive"
    if known.irt is not None:
        if adaptive:
            return adaptive_c(rows, subset, irt)
        variance = float(np.mean([(naive(row[subset.items], subset).error or 0.0) ** 2 for row in rows]))
        return bias_variance_c(validation_error(irt, rows, subset), variance)
    from merganser.evolve.irt.fitting import fit

    unseen = leave_out(
        np.concatenate([_gather_others(parts, known), rows]),
        lambda answers: fit(answers, dimensions=min(irt.dimensions, max(1, len(answers)))),
        lambda without: _extract(task, parts, len(subset), without, known, seed),
    )
    return cross_validated_c(unseen) if adaptive else cross_validated_bias_variance_c(unseen)


def cautions(name: str, task: StudyTask, endpoints: int, known: Calibration) -> list[str]:
    """Return what a user should know before trusting a task's IRT."""
    models = endpoints + (0 if known.answers is None else len(np.atleast_2d(known.answers)))
    if not task.needs_irt or known.irt is not None or models >= ENOUGH_MODELS:
        return []
    return [
        f"task {name!r}: its IRT is fitted to only {models} models; fewer than {ENOUGH_MODELS} determine "
        "items poorly: give answers of more models (calibration), or use random items and the naive estimator"
    ]


def read_prepared(store: Store, tasks: Iterable[str]) -> dict[str, Prepared]:
    """Read the prepared tasks: splits, subsets, estimators."""
    found = {}
    for name in tasks:
        content = store.artifact(f"prepared/{name}")
        if content is None:
            raise MerganserError(f"{store.path}: task {name!r} has not been prepared yet")
        try:
            found[name] = from_bytes(content)
        except ValueError as error:
            raise InputError(f"{store.path}: its data of task {name!r} are damaged: {error}") from error
    return found


def to_bytes(prepared: Prepared) -> bytes:
    """Serialise for the store, so that a resumed study has the same bits on any machine."""
    from safetensors.numpy import save

    estimator = prepared.estimator
    arrays: dict[str, Any] = {
        "pool": prepared.split.pool.astype(np.int64),
        "test": prepared.split.test.astype(np.int64),
        "subset": prepared.subset.items.astype(np.int64),
        "weights": prepared.subset.weights,
    }
    if estimator.irt is not None and estimator.endpoints is not None:
        bare = IRT(estimator.irt.abilities, replace(estimator.irt.items, errors=None), estimator.irt.prior)
        arrays |= bare.to_arrays() | {"endpoints": estimator.endpoints}
    metadata = {"estimator": json.dumps({"name": estimator.name, "c": estimator.c})}
    return bytes(save({k: np.ascontiguousarray(v) for k, v in arrays.items()}, metadata))


def from_bytes(content: bytes) -> Prepared:
    """Return the task from the bytes of `to_bytes`.

    Raises:
        ValueError: If the bytes are damaged.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        arrays = load(content)
        header = parse_json(content[8 : 8 + int.from_bytes(content[:8], "little")])
        settings = parse_json(header["__metadata__"]["estimator"])
        irt = IRT.from_arrays(arrays) if "abilities" in arrays else None
        prepared = Prepared(
            Split(arrays["pool"].astype(np.intp), arrays["test"].astype(np.intp)),
            Subset(arrays["subset"].astype(np.intp), arrays["weights"]),
            Estimator(settings["name"], irt, arrays.get("endpoints"), settings["c"]),
        )
        if (prepared.subset.items < 0).any() or min(map(min, (prepared.split.pool, prepared.split.test))) < 0:
            raise ValueError("an item has a negative number")
        prepared.items  # noqa: B018 (an item beyond the pool fails here)
    except (SafetensorError, InputError, LookupError, TypeError) as error:
        raise ValueError(str(error) or type(error).__name__) from error
    return prepared
