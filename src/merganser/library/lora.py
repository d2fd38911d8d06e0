"""Task matrices as PEFT LoRA adapters, for servers that know nothing of libraries; adapters merged to an adapter."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from merganser.checkpoints.adapter import AdapterFile
from merganser.checkpoints.base import Checkpoint, is_integer
from merganser.checkpoints.dtypes import dtype_of
from merganser.checkpoints.opening import Reference, locate
from merganser.checkpoints.opening import open as open_checkpoint
from merganser.engine.directories import paths_in
from merganser.engine.publishing import check_out, publish
from merganser.errors import CheckpointError, InputError, one_of
from merganser.kernels.spectra import Factors, top_svd
from merganser.library.adapter_modules import AdapterModules, Role
from merganser.library.building import check_finite, check_fit, task_matrix
from merganser.library.views import Expert
from merganser.methods.adapters import Pair, Space, balanced, merge_pairs, truncate_pair
from merganser.methods.registry import build, lookup

#: What PEFT and its servers read.
DTYPES = ("float32", "bfloat16", "float16")
_LINEAR = ("lora_A.weight", "lora_B.weight")


@dataclass(frozen=True)
class AdapterReport:
    """What went into an adapter: its rank, the share of the task vector's energy it holds, and what could not go."""

    path: Path
    rank: int
    modules: int
    energy: float
    left_out: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            "path": str(self.path),
            "rank": self.rank,
            "modules": self.modules,
            "energy": self.energy,
            "left_out": list(self.left_out),
        }


@dataclass(frozen=True)
class _Change:
    """One changed tensor: its energy, and what an adapter can hold of it: factors, or all of it."""

    name: str
    energy: float
    role: Role | None = None
    factors: Factors | None = None
    whole: Tensor | None = None


@dataclass(frozen=True)
class _Update:
    """A low-rank update of a tensor as stored, and how its factors are oriented in the file."""

    pair: Pair
    role: Role


def extract_lora(
    finetuned: Reference,
    base: Reference,
    out: str | os.PathLike[str],
    *,
    rank: int = 64,
    dtype: str | torch.dtype = "bfloat16",
    fan_in_fan_out: bool | None = None,
    overwrite: bool = False,
) -> AdapterReport:
    """Make the best adapter of `rank` for the difference of two checkpoints, in PEFT's format.

    Linear layers, GPT-2's Conv1D and embeddings are changed at low rank; the head of a classifier is saved whole. What
    else changed (norms, biases, embeddings that are tied to the head) is named in the report, with the share of the
    energy that was kept.

    Args:
        finetuned: The fine-tuned checkpoint.
        base: The checkpoint it was fine-tuned from.
        out: Directory of the adapter to be made.
        rank: Rank of every update, at most.
        dtype: float32, bfloat16 or float16.
        fan_in_fan_out: Whether weights are stored input × output, as in GPT-2; by default as the config says.
        overwrite: Replace `out`.

    Returns:
        What went into the adapter, and what could not.

    Raises:
        InputError: Nothing that fits an adapter has changed, or `out` cannot be written.

    Example:
        >>> extract_lora("law", "base", "law-lora", rank=16)  # doctest: +SKIP
    """
    _check_rank(rank)
    stored = _dtype(dtype)
    tuned, origin = open_checkpoint(finetuned), open_checkpoint(base)
    inputs = [path for source in (finetuned, base, tuned.label, origin.label) for path in paths_in(source)]
    check_out(Path(out), overwrite, [*inputs, *tuned.files(), *origin.files()])
    check_fit(origin, tuned)
    modules = AdapterModules(origin, tuned, fan_in_fan_out)
    return _write(_differences(tuned, origin, rank, modules), Path(out), rank, origin, stored, modules, overwrite)


def export_expert(
    expert: Expert,
    out: str | os.PathLike[str],
    *,
    rank: int | None = None,
    dtype: str | torch.dtype = "bfloat16",
    fan_in_fan_out: bool | None = None,
    overwrite: bool = False,
) -> AdapterReport:
    """An expert of a library as an adapter, at its own rank (that of its largest matrix) or less."""
    _check_rank(rank)
    stored = _dtype(dtype)
    check_out(Path(out), overwrite, expert.files())
    file = expert.file
    ranks = [file.rank(name) for name, kind in file.kinds.items() if kind == "factors"]
    limit = max(ranks, default=1) if rank is None else rank
    modules = AdapterModules(expert.source, expert, fan_in_fan_out)
    return _write(_stored(expert, limit, modules), Path(out), limit, expert.source, stored, modules, overwrite)


def merge_adapters(
    adapters: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    space: Space = "core_space",
    method: str = "tsv",
    rank: int | None = None,
    dtype: str | torch.dtype = "bfloat16",
    overwrite: bool = False,
    **parameters: Any,
) -> AdapterReport:
    """Merge LoRA adapters of one base into one adapter, by `method` in a shared basis (see `methods.adapters`).

    The result has at most the sum of their ranks; `rank` cuts it down, and the report says how much energy that leaves.
    No base is read.
    """
    if not adapters:
        raise InputError("nothing to merge")
    one_of("space", space, Space)
    _check_rank(rank)
    stored = _dtype(dtype)
    check_out(Path(out), overwrite, [path for adapter in adapters for path in paths_in(adapter)])
    files = [AdapterFile(locate(os.fspath(path))) for path in adapters]
    names = list(files[0].updates)
    for file in files:
        if file.replaced:
            raise CheckpointError(f"{file.path}: replaces whole modules; only low-rank updates can be merged")
        if set(file.updates) != set(names):
            odd = sorted(set(file.updates) ^ set(names))[0]
            raise CheckpointError(f"{file.path} and {files[0].path} change different weights, such as {odd!r}")
    rule = build(lookup(method), parameters, [str(file.path) for file in files])
    updates: dict[str, _Update] = {}
    seen = kept = 0.0
    for name in names:
        scaled = [(file.updates[name].scale * b, a) for file in files for b, a in [file.factors(name)]]
        merged = merge_pairs(scaled, space, rule)
        pair = truncate_pair(merged, merged[0].shape[1] if rank is None else rank)
        updates[name] = _Update(pair, _role_in(files[0], name))
        seen, kept = seen + _energy(merged), kept + _energy(pair)
    config = {key: files[0].config.get(key) for key in ("base_model_name_or_path", "task_type", "fan_in_fan_out")}
    return _save(Path(out), updates, {}, config, stored, _share(kept, seen), overwrite)


def _role_in(file: AdapterFile, name: str) -> Role:
    """Return how an adapter's file has the factors of a weight."""
    if "lora_embedding_A" in file.updates[name].a:
        return "embedding"
    return "turned" if file.config.get("fan_in_fan_out") else "linear"


def _energy(pair: Pair) -> float:
    """‖BA‖² without the product."""
    b, a = (side.double() for side in pair)
    return float(((b.T @ b) * (a @ a.T)).sum())


def _share(kept: float, seen: float) -> float:
    return min(1.0, kept / seen) if seen else 1.0


def _check_rank(rank: int | None) -> None:
    if rank is not None and rank < 1:
        raise InputError(f"an adapter needs a rank of at least 1, got {rank}")


def _dtype(given: str | torch.dtype) -> torch.dtype:
    return dtype_of(given, DTYPES, "adapters")


def _differences(tuned: Checkpoint, base: Checkpoint, rank: int, modules: AdapterModules) -> Iterator[_Change]:
    for name in tuned.names():
        spec = tuned.spec(name)
        known = name in base and base.spec(name).shape == spec.shape
        if modules.is_head(name):
            check_finite(tuned.read(name), name, tuned.label)
            energy = float(task_matrix(base, tuned, name).double().square().sum()) if known else 0.0
            yield _Change(name, energy, "whole", whole=tuned.read(name))
        elif not known:
            yield _Change(name, 0.0)
        elif not torch.equal(tuned.read(name), base.read(name).to(spec.dtype)):
            if is_integer(spec.dtype):
                yield _Change(name, 0.0)
                continue
            check_finite(tuned.read(name), name, tuned.label)
            check_finite(base.read(name), name, base.label)
            delta = task_matrix(base, tuned, name)
            role = modules.role(name, spec.shape)
            energy = float(delta.double().square().sum())
            yield _Change(name, energy, role, top_svd(delta, rank) if role is not None else None)


def _stored(expert: Expert, rank: int, modules: AdapterModules) -> Iterator[_Change]:
    for name in expert.file.kinds:
        if not expert.merges(name):
            yield _Change(name, 0.0)
            continue
        energy = float(expert.delta(name).double().square().sum())
        role = modules.role(name, expert.spec(name).shape)
        if role == "whole":
            yield _Change(name, energy, role, whole=expert.read(name))
        else:
            yield _Change(name, energy, role, expert.factors(name, rank) if role is not None else None)


def _write(
    changes: Iterator[_Change],
    out: Path,
    rank: int,
    base: Checkpoint,
    dtype: torch.dtype,
    modules: AdapterModules,
    overwrite: bool,
) -> AdapterReport:
    updates: dict[str, _Update] = {}
    whole: dict[str, Tensor] = {}
    left_out: list[str] = []
    seen = kept = 0.0
    for change in changes:
        seen += change.energy
        name = f"{modules.prefix}{change.name}"
        if change.whole is not None:
            kept += change.energy
            whole[name] = change.whole
        elif change.factors is not None and change.role is not None:
            factors = change.factors.truncate(rank)
            kept += float(factors.s.square().sum())
            updates[name] = _Update(balanced(factors), change.role)
        else:
            left_out.append(change.name)
    if not updates:
        raise InputError(f"no weight that an adapter can change differs from {base.label}: there is nothing to adapt")
    config = {
        "base_model_name_or_path": base.label,
        "fan_in_fan_out": modules.fan_in_fan_out,
        "task_type": modules.task_type,
    }
    return _save(out, updates, whole, config, dtype, _share(kept, seen), overwrite, left_out)


def _save(
    out: Path,
    updates: Mapping[str, _Update],
    whole: Mapping[str, Tensor],
    config: Mapping[str, Any],
    dtype: torch.dtype,
    energy: float,
    overwrite: bool,
    left_out: Sequence[str] = (),
) -> AdapterReport:
    """One rank for all modules, filled up with zeros: some servers know no other."""
    rank = max(1, *(update.pair[0].shape[1] for update in updates.values()))
    tensors = {f"base_model.model.{name}": tensor.to(dtype).contiguous() for name, tensor in whole.items()}
    for name, update in updates.items():
        b, a = update.pair
        down, up = (a, b) if update.role == "linear" else (b.T, a.T)
        key = f"base_model.model.{name.removesuffix('.weight')}"
        names = ("lora_embedding_A", "lora_embedding_B") if update.role == "embedding" else _LINEAR
        tensors[f"{key}.{names[0]}"] = _filled(down.T, rank, dtype).T.contiguous()
        tensors[f"{key}.{names[1]}"] = _filled(up, rank, dtype)
    settings = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": sorted(name.removesuffix(".weight") for name in updates),
        "lora_dropout": 0.0,
        "bias": "none",
        "task_type": None,
        "inference_mode": True,
        "fan_in_fan_out": False,
    }
    if whole:
        settings["modules_to_save"] = sorted({name.rpartition(".")[0] for name in whole})
    settings |= {key: value for key, value in config.items() if value is not None}
    publish(
        out,
        lambda directory: (
            save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"}),
            (directory / "adapter_config.json").write_text(json.dumps(settings, indent=2) + "\n"),
        ),
        overwrite=overwrite,
    )
    return AdapterReport(out, rank, len(updates), energy, tuple(left_out))


def _filled(columns: Tensor, rank: int, dtype: torch.dtype) -> Tensor:
    return torch.nn.functional.pad(columns, (0, rank - columns.shape[1])).to(dtype).contiguous()
