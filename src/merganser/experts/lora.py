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
from merganser.experts.building import check_finite, check_fit, task_matrix
from merganser.experts.views import Expert
from merganser.kernels.spectra import Factors, top_svd
from merganser.methods.adapters import Pair, Space, balanced, merge_pairs, truncate_pair
from merganser.methods.registry import build, lookup

#: What PEFT and its servers read.
DTYPES = ("float32", "bfloat16", "float16")
#: Embeddings and tensors of this kind are no Linear layers, which is what adapters change.
_LOOKUPS = ("embed", "wte", "wpe", "lm_head")


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
    """One changed tensor: its energy, and its factors if an adapter can hold it."""

    name: str
    energy: float
    factors: Factors | None


def extract_lora(
    finetuned: Reference,
    base: Reference,
    out: str | os.PathLike[str],
    *,
    rank: int = 64,
    dtype: str | torch.dtype = "bfloat16",
    fan_in_fan_out: bool = False,
    overwrite: bool = False,
) -> AdapterReport:
    """The best adapter of `rank` for the difference of two checkpoints, in PEFT's format.

    Only weights of Linear layers fit an adapter; whatever else changed (embeddings, norms, biases) is named in the
    report, with the share of the energy that was kept.
    """
    _check_rank(rank)
    stored = _dtype(dtype)
    tuned, origin = open_checkpoint(finetuned), open_checkpoint(base)
    inputs = [path for source in (finetuned, base, tuned.label, origin.label) for path in paths_in(source)]
    check_out(Path(out), overwrite, [*inputs, *tuned.files(), *origin.files()])
    check_fit(origin, tuned)
    return _write(_differences(tuned, origin, rank), Path(out), rank, origin, stored, fan_in_fan_out, overwrite)


def export_expert(
    expert: Expert,
    out: str | os.PathLike[str],
    *,
    rank: int | None = None,
    dtype: str | torch.dtype = "bfloat16",
    fan_in_fan_out: bool = False,
    overwrite: bool = False,
) -> AdapterReport:
    """An expert of a library as an adapter, at its own rank (that of its largest matrix) or less."""
    _check_rank(rank)
    stored = _dtype(dtype)
    check_out(Path(out), overwrite, expert.files())
    file = expert.file
    ranks = [file.rank(name) for name, kind in file.kinds.items() if kind == "factors"]
    limit = max(ranks, default=1) if rank is None else rank
    return _write(_stored(expert, limit), Path(out), limit, expert.source, stored, fan_in_fan_out, overwrite)


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
    pairs: dict[str, Pair] = {}
    seen = kept = 0.0
    for name in names:
        scaled = [(file.updates[name].scale * b, a) for file in files for b, a in [file.factors(name)]]
        merged = merge_pairs(scaled, space, rule)
        pairs[name] = truncate_pair(merged, merged[0].shape[1] if rank is None else rank)
        seen, kept = seen + _energy(merged), kept + _energy(pairs[name])
    config = {key: files[0].config.get(key) for key in ("base_model_name_or_path", "task_type", "fan_in_fan_out")}
    return _save(Path(out), pairs, config, stored, _share(kept, seen), overwrite)


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


def _differences(tuned: Checkpoint, base: Checkpoint, rank: int) -> Iterator[_Change]:
    for name in tuned.names():
        spec = tuned.spec(name)
        if name not in base or base.spec(name).shape != spec.shape:
            yield _Change(name, 0.0, None)
        elif not torch.equal(tuned.read(name), base.read(name).to(spec.dtype)):
            if is_integer(spec.dtype):
                yield _Change(name, 0.0, None)
                continue
            check_finite(tuned.read(name), name, tuned.label)
            check_finite(base.read(name), name, base.label)
            delta = task_matrix(base, tuned, name)
            fits = _is_linear(name, spec.shape)
            yield _Change(name, float(delta.double().square().sum()), top_svd(delta, rank) if fits else None)


def _stored(expert: Expert, rank: int) -> Iterator[_Change]:
    for name in expert.file.kinds:
        if not expert.merges(name):
            yield _Change(name, 0.0, None)
            continue
        energy = float(expert.delta(name).double().square().sum())
        yield _Change(name, energy, expert.factors(name, rank) if _is_linear(name, expert.spec(name).shape) else None)


def _is_linear(name: str, shape: Sequence[int]) -> bool:
    return len(shape) == 2 and name.endswith(".weight") and not any(word in name for word in _LOOKUPS)


def _write(
    changes: Iterator[_Change],
    out: Path,
    rank: int,
    base: Checkpoint,
    dtype: torch.dtype,
    fan_in_fan_out: bool,
    overwrite: bool,
) -> AdapterReport:
    pairs: dict[str, Pair] = {}
    left_out: list[str] = []
    seen = kept = 0.0
    for change in changes:
        seen += change.energy
        if change.factors is None:
            left_out.append(change.name)
            continue
        factors = change.factors.truncate(rank)
        kept += float(factors.s.square().sum())
        pairs[change.name] = balanced(factors)
    if not pairs:
        raise InputError(f"no weight of a Linear layer differs from {base.label}: there is nothing to adapt")
    config = {"base_model_name_or_path": base.label, "fan_in_fan_out": fan_in_fan_out}
    return _save(out, pairs, config, dtype, _share(kept, seen), overwrite, left_out)


def _save(
    out: Path,
    pairs: Mapping[str, Pair],
    config: Mapping[str, Any],
    dtype: torch.dtype,
    energy: float,
    overwrite: bool,
    left_out: Sequence[str] = (),
) -> AdapterReport:
    """One rank for all modules, filled up with zeros: some servers know no other."""
    rank = max(1, *(b.shape[1] for b, _ in pairs.values()))
    turned = bool(config.get("fan_in_fan_out"))
    tensors: dict[str, Tensor] = {}
    for name, (b, a) in pairs.items():
        down, up = (b.T, a.T) if turned else (a, b)
        key = f"base_model.model.{name.removesuffix('.weight')}"
        tensors[f"{key}.lora_A.weight"] = _filled(down.T, rank, dtype).T.contiguous()
        tensors[f"{key}.lora_B.weight"] = _filled(up, rank, dtype)
    settings = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": sorted(name.removesuffix(".weight") for name in pairs),
        "lora_dropout": 0.0,
        "bias": "none",
        "task_type": None,
        "inference_mode": True,
        "fan_in_fan_out": False,
    }
    settings |= {key: value for key, value in config.items() if value is not None}
    publish(
        out,
        lambda directory: (
            save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"}),
            (directory / "adapter_config.json").write_text(json.dumps(settings, indent=2) + "\n"),
        ),
        overwrite=overwrite,
    )
    return AdapterReport(out, rank, len(pairs), energy, tuple(left_out))


def _filled(columns: Tensor, rank: int, dtype: torch.dtype) -> Tensor:
    return torch.nn.functional.pad(columns, (0, rank - columns.shape[1])).to(dtype).contiguous()
