"""Merge adapters into one adapter, by any rule for task vectors."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor

from merganser.checkpoints.adapter import Adapted
from merganser.checkpoints.adapter_file import PREFIX, AdapterFile
from merganser.checkpoints.dtypes import dtype_of
from merganser.checkpoints.opening import Reference, locate
from merganser.checkpoints.opening import open as open_checkpoint
from merganser.checkpoints.reads import noting_reads
from merganser.engine.adapter_origin import AdapterOrigin
from merganser.engine.directories import paths_in
from merganser.engine.publishing import check_out
from merganser.errors import CheckpointError, InputError, one_of
from merganser.kernels.spectra import top_svd
from merganser.library.adapter_writing import (
    DTYPES,
    AdapterReport,
    Orientation,
    StoredUpdate,
    check_rank,
    save_adapter,
    share,
)
from merganser.methods.adapters import AdapterMethod, FactorPair, apply_rule, balanced, merge_pairs, truncate_pair
from merganser.methods.base import Method
from merganser.methods.registry import build, lookup, parameters
from merganser.plain import plain

#: Where updates are merged: in a shared basis, as whole matrices, or by concatenating factors.
MergeSpace = Literal["core_space", "knots", "full", "concat"]


def merge_adapters(
    adapters: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    space: MergeSpace = "core_space",
    method: str = "tsv",
    weights: Sequence[float] | None = None,
    scale: float = 1.0,
    rank: int | None = None,
    base: Reference | None = None,
    dtype: str | torch.dtype = "bfloat16",
    seed: int = 0,
    overwrite: bool = False,
    on_progress: Callable[[int, int, str], None] = lambda done, total, name: None,
    **settings: Any,
) -> AdapterReport:
    """Merge LoRA adapters of one base into one adapter.

    A weight that an adapter does not change has a zero update in it. Tensors saved whole are merged as weights: by
    `method` around the base's if `base` is given, else as their weighted average.

    Args:
        adapters: Directories of adapters, or hub ids.
        out: Directory of the new adapter.
        space: `core_space` and `knots` merge in a shared low-rank basis (see `methods.adapters`), `full` merges the
            matrices B·A themselves and decomposes the result, `concat` is exactly Σ w·s·B·A, with concatenated factors.
        method: Name of a merging rule, such as tsv, ties, dare_linear or task_arithmetic; not used by `concat`.
        weights: One per adapter.
        scale: Factor on the merged update.
        rank: Largest rank of the result; by default that of all adapters together.
        base: The base, required if only some adapters save a tensor whole.
        dtype: float32, bfloat16 or float16.
        seed: Seed of random rules.
        overwrite: Replace `out`.
        on_progress: Called with the weights done, those in all, and the name of the next.
        **settings: Other parameters of the method, such as `density`; per-model ones as sequences.

    Returns:
        A report of the adapter; `energy` is the share of the merged updates' energy that `rank` kept.

    Raises:
        InputError: If an adapter is not a LoRA adapter, the adapters do not fit together, or `out` cannot be written.

    Example:
        >>> merge_adapters(["law", "art"], "both", space="full", method="ties", density=0.2)  # doctest: +SKIP
    """
    if not adapters:
        raise InputError("expected at least one adapter to merge")
    one_of("space", space, MergeSpace)
    check_rank(rank)
    stored = dtype_of(dtype, DTYPES, "adapters")
    check_out(Path(out), overwrite, [path for each in (*adapters, base or "") for path in paths_in(each) if each])
    files = [_open(path) for path in adapters]
    if weights is not None and len(weights) != len(files):
        raise InputError(f"{len(weights)} weights are given for {len(files)} adapters")
    rule = None if space == "concat" else _build_rule(method, settings, weights, files)
    if rule is None and settings:
        raise InputError(f"concat has no parameter {next(iter(settings))!r}: it only takes weights and a scale")
    made_by = {"function": "merge_adapters", "space": space, "method": method, "weights": weights, "scale": scale}
    made_by |= {"rank": rank, "dtype": str(dtype), "seed": seed, "settings": plain(settings)}
    origin = AdapterOrigin(made_by, [(os.fspath(p), f.weights) for p, f in zip(adapters, files, strict=True)])
    mixer = _Mixer(files, space, rule, tuple(weights or [1.0] * len(files)), scale, rank, seed)
    updates: dict[str, StoredUpdate] = {}
    seen = kept = 0.0
    names = list(dict.fromkeys(name for file in files for name in file.updates))
    with noting_reads(origin.reads):
        for number, name in enumerate(names):
            on_progress(number, len(names), name)
            updates[name], before, after = mixer.merge(name)
            seen, kept = seen + before, kept + after
        whole, notes = mixer.merge_whole(base)
    keys = ("base_model_name_or_path", "task_type", "fan_in_fan_out", "ensure_weight_tying", "bias")
    config = {
        key: next((f.config[key] for f in files if f.config.get(key) not in (None, "none")), None) for key in keys
    }
    saved = {each for f in files for each in f.config.get("modules_to_save") or ()}
    largest = save_adapter(
        Path(out), updates, whole, config, stored, overwrite=overwrite, origin=origin, saved_modules=saved
    )
    return AdapterReport(Path(out), largest, len(updates), share(kept, seen), whole=tuple(whole), notes=tuple(notes))


def _open(path: str | os.PathLike[str]) -> AdapterFile:
    file = AdapterFile(locate(os.fspath(path)))
    if file.needs_peft:
        raise CheckpointError(
            f"{file.path}: {file.needs_peft}, so it is not a set of low-rank updates; merge it with its base"
        )
    for name in file.updates:
        file.low_rank(name)
    return file


def _build_rule(
    method: str, settings: Mapping[str, Any], weights: Sequence[float] | None, files: Sequence[AdapterFile]
) -> Method:
    kind = lookup(method)
    known = parameters(kind)
    given = dict(settings)
    if weights is not None:
        if "weight" not in known:
            raise InputError(f"method {method!r} has no weights")
        given["weight"] = list(weights)
    for name, value in given.items():
        if name in known and known[name].per_model and not isinstance(value, list | tuple):
            given[name] = [value] * len(files)
    rule = build(kind, given, [str(file.path) for file in files])
    if kind.statistics:
        raise InputError(
            f"method {method!r} needs {' and '.join(kind.statistics)} statistics; merge whole models with it"
        )
    if rule.looks_first:
        raise InputError(
            f"method {method!r} needs all tensors before it merges the first, but adapters are merged one by one; "
            + ("set norms to 'keep'" if rule.equalizes else "set scope to 'tensor'")
        )
    return rule


@dataclass(frozen=True)
class _Mixer:
    """Merges the updates of one weight."""

    files: Sequence[AdapterFile]
    space: MergeSpace
    rule: Method | None
    weights: tuple[float, ...]
    scale: float
    rank: int | None
    seed: int

    def merge(self, name: str) -> tuple[StoredUpdate, float, float]:
        """Return the merged update of a weight, and its energy before and after truncation to the rank."""
        orientation, window = self._find_form(name)
        pairs = self._read_pairs(name)
        together = sum(b.shape[1] for b, _ in pairs)
        seed = zlib.crc32(name.encode()) ^ self.seed
        if self.space == "full":
            assert self.rule is not None
            merged = apply_rule(self.rule, [b @ a for b, a in pairs], name=name, seed=self.seed) * self.scale
            found = top_svd(merged, self.rank or together)
            update = StoredUpdate(balanced(found), orientation, window)
            return update, float(merged.double().square().sum()), float(found.s.square().sum())
        if self.rule is None:
            weighted = [(weight * self.scale * b, a) for weight, (b, a) in zip(self.weights, pairs, strict=True)]
            merged_pair = torch.cat([b for b, _ in weighted], 1), torch.cat([a for _, a in weighted])
        else:
            b, a = merge_pairs(pairs, cast(AdapterMethod, self.space), self.rule, seed)
            merged_pair = (b * self.scale, a)
        exact = self.rule is None and (self.rank is None or together <= self.rank)
        pair = merged_pair if exact else truncate_pair(merged_pair, self.rank or merged_pair[0].shape[1])
        return StoredUpdate(pair, orientation, window), _energy(merged_pair), _energy(pair)

    def _find_form(self, name: str) -> tuple[Orientation, tuple[int, ...]]:
        """Return the orientation of a weight's factors in the files, and the window of a convolution."""
        found: dict[tuple[Orientation, tuple[int, ...], tuple[int, ...]], AdapterFile] = {}
        for file in self.files:
            if name in file.updates:
                update = file.low_rank(name)
                turned: Orientation = "turned" if file.config.get("fan_in_fan_out") else "linear"
                shape = tuple(update.shapes()[0])
                kind: Orientation = "embedding" if update.embedding else "convolution" if len(shape) > 2 else turned
                found[kind, shape, shape[2:]] = file
        if len(found) > 1:
            one, other, *_ = found.values()
            (a, b, _), (c, d, _), *_ = found
            raise CheckpointError(
                f"{one.path} and {other.path} change {name!r} differently: {a} {list(b)} and {c} {list(d)}"
            )
        orientation, _, window = next(iter(found))
        return orientation, window

    def _read_pairs(self, name: str) -> list[FactorPair]:
        """Return (s·B, A) of every adapter as matrices; one component of zeros if an adapter has none."""
        found = {
            i: (file.low_rank(name).scale * b.flatten(1), a.flatten(1))
            for i, file in enumerate(self.files)
            if name in file.updates
            for b, a in [file.factors(name)]
        }
        b, a = next(iter(found.values()))
        none = (torch.zeros(b.shape[0], 1), torch.zeros(1, a.shape[1]))
        return [found.get(i, none) for i in range(len(self.files))]

    def merge_whole(self, base: Reference | None) -> tuple[dict[str, Tensor], list[str]]:
        """Return tensors that are saved whole, merged as weights, by their names in the file; and notes."""
        names = dict.fromkeys(name for file in self.files for name in file.replaced)
        if not names:
            return {}, []
        views = None if base is None else [Adapted(open_checkpoint(base), file) for file in self.files]
        merged: dict[str, Tensor] = {}
        for name in names:
            having = [file for file in self.files if name in file.replaced]
            key = having[0].replaced[name].removeprefix(PREFIX)
            dtype = having[0].weights.spec(having[0].replaced[name]).dtype
            merged[key] = self._average(name, having) if views is None else self._merge_around(name, views, dtype)
        way = "averaged by their weights, since no base is given" if base is None else "merged around the base's"
        return merged, [f"{len(names)} tensors saved whole, such as {next(iter(names))!r}, are {way}"]

    def _average(self, name: str, having: Sequence[AdapterFile]) -> Tensor:
        lacking = [file for file in self.files if name not in file.replaced]
        if lacking:
            raise CheckpointError(
                f"{having[0].path} saves {name!r} whole, {lacking[0].path} does not; give the base, which has "
                "its weight"
            )
        tensors = [file.weights.read(file.replaced[name]) for file in having]
        if len({tensor.shape for tensor in tensors}) > 1:
            shapes = ", ".join(f"{list(t.shape)} in {f.path}" for t, f in zip(tensors, having, strict=True))
            raise CheckpointError(f"{name!r} has unequal shapes: {shapes}")
        total = sum(self.weights)
        if not total:
            raise InputError("the weights add up to 0, so tensors saved whole have no average; give the base")
        mixed = sum(weight / total * tensor.double() for weight, tensor in zip(self.weights, tensors, strict=True))
        return cast(Tensor, mixed).to(tensors[0].dtype)

    def _merge_around(self, name: str, views: Sequence[Adapted], dtype: torch.dtype) -> Tensor:
        target = next((each for view in views if (each := view.stored_name(name)) is not None), None)
        if target is None:
            raise CheckpointError(f"{views[0].source.label} has no {name!r}, which the adapters save whole")
        tensors = [view.read(view.resolve(target, view)).float() for view in views]
        origin = views[0].source
        anchor = origin.read(views[0].resolve(target, origin)).float()
        if len({tensor.shape for tensor in (*tensors, anchor)}) > 1:
            raise CheckpointError(
                f"{name!r} has different rows in an adapter and in the base; unify the tokenizers first"
            )
        if self.rule is None:
            deltas = [weight * (tensor - anchor) for weight, tensor in zip(self.weights, tensors, strict=True)]
            return (anchor + self.scale * sum(deltas)).to(dtype)
        return (anchor + self.scale * (apply_rule(self.rule, tensors, anchor, name=name, seed=self.seed) - anchor)).to(
            dtype
        )


def _energy(pair: FactorPair) -> float:
    """Return ‖BA‖² without computing the product."""
    b, a = (side.double() for side in pair)
    return float(((b.T @ b) * (a @ a.T)).sum())
