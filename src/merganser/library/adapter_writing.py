"""Write low-rank updates and whole tensors as a PEFT adapter."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from merganser.checkpoints.adapter_file import PREFIX
from merganser.checkpoints.cards import render_adapter_card
from merganser.checkpoints.kinds import ADAPTER_CONFIG
from merganser.engine.adapter_origin import AdapterOrigin
from merganser.engine.publishing import publish
from merganser.errors import InputError
from merganser.methods.adapters import FactorPair
from merganser.plain import plain

WEIGHTS = "adapter_model.safetensors"
#: What PEFT and its servers read.
DTYPES = ("float32", "bfloat16", "float16")
#: A Linear layer; one stored input × output; an embedding; a convolution.
Orientation = Literal["linear", "turned", "embedding", "convolution"]


@dataclass(frozen=True)
class AdapterReport:
    """The content of an adapter: its rank, the share of the task vector's energy it keeps, and what was left out.

    `energy` and `residual`, ‖θ − θ̂‖ / ‖θ − θ₀‖, are over all tensors, including those left out, with the factors as
    stored.
    """

    path: Path
    rank: int
    modules: int
    energy: float
    left_out: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def residual(self) -> float:
        return math.sqrt(max(0.0, 1.0 - self.energy))

    def to_dict(self) -> dict[str, Any]:
        return {**plain(self), "path": str(self.path), "residual": self.residual}


@dataclass(frozen=True)
class StoredUpdate:
    """A low-rank update of a stored tensor, and the orientation of its factors in the file."""

    pair: FactorPair
    orientation: Orientation
    window: tuple[int, ...] = ()

    @property
    def rank(self) -> int:
        return self.pair[0].shape[1]

    def factors(self, rank: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return (A, B) in the shapes of PEFT's file, padded with zeros to a rank."""
        b, a = self.pair
        down, up = (b.T, a.T) if self.orientation in ("turned", "embedding") else (a, b)
        down, up = (_fill(side, rank).to(dtype).contiguous() for side in (down.T, up))
        down = down.T.contiguous()
        if self.window:
            return down.reshape(rank, -1, *self.window), up.reshape(len(up), rank, *[1] * len(self.window))
        return down, up

    def product(self, dtype: torch.dtype) -> Tensor:
        """Return the update with rounded factors, as a matrix."""
        b, a = (side.to(dtype).double() for side in self.pair)
        return b @ a


def check_rank(rank: int | None) -> None:
    if rank is not None and rank < 1:
        raise InputError(f"an adapter needs a rank of at least 1, got {rank}")


def share(kept: float, seen: float) -> float:
    """Return the share of an energy that was kept; 1 if there was none."""
    return min(1.0, kept / seen) if seen else 1.0


def save_adapter(
    out: Path,
    updates: Mapping[str, StoredUpdate],
    whole: Mapping[str, Tensor],
    config: Mapping[str, Any],
    dtype: torch.dtype,
    *,
    overwrite: bool,
    origin: AdapterOrigin,
    saved_modules: Iterable[str] = (),
    patterns: bool = False,
) -> int:
    """Write an adapter.

    Args:
        out: Directory to create.
        updates: Low-rank updates by the names of weights.
        whole: Tensors by their names in the file, without PEFT's prefix.
        config: Settings that do not follow from the updates; None values are left out.
        dtype: Dtype of the factors.
        overwrite: Replace `out`.
        origin: What it is made of, for its lock file.
        saved_modules: Modules that `whole` has every parameter of.
        patterns: Give each module its own rank; some servers know one rank for all, the default.

    Returns:
        The largest rank.
    """
    rank = max([1, *(update.rank for update in updates.values())])
    tensors = {f"{PREFIX}{name}": tensor.contiguous() for name, tensor in whole.items()}
    ranks = {
        name.removesuffix(".weight"): max(1, update.rank) if patterns else rank for name, update in updates.items()
    }
    for name, update in updates.items():
        module = name.removesuffix(".weight")
        embedding = update.orientation == "embedding"
        names = ("lora_embedding_A", "lora_embedding_B") if embedding else ("lora_A.weight", "lora_B.weight")
        for part, tensor in zip(names, update.factors(ranks[module], dtype), strict=True):
            tensors[f"{PREFIX}{module}.{part}"] = tensor
    own = {module: each for module, each in ranks.items() if each != rank}
    settings: dict[str, Any] = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": sorted(ranks),
        "lora_dropout": 0.0,
        "bias": "none",
        "task_type": None,
        "inference_mode": True,
        "fan_in_fan_out": False,
    }
    if own:
        settings |= {"rank_pattern": own, "alpha_pattern": own}
    if modules := sorted(saved_modules):
        settings["modules_to_save"] = modules
    settings |= {key: value for key, value in config.items() if value is not None}

    def write(directory: Path) -> None:
        save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
        (directory / ADAPTER_CONFIG).write_text(json.dumps(settings, indent=2) + "\n")
        card = render_adapter_card(
            settings.get("base_model_name_or_path"), origin.made_by, [label for label, _ in origin.sources]
        )
        (directory / "README.md").write_text(card, encoding="utf-8")
        origin.lock(directory, WEIGHTS)

    publish(out, write, overwrite=overwrite)
    return rank


def _fill(columns: Tensor, rank: int) -> Tensor:
    return torch.nn.functional.pad(columns, (0, rank - columns.shape[1]))


def module_of(name: str) -> str:
    """Return the module that a parameter belongs to."""
    return name.rpartition(".")[0]


def group_by_module(names: Sequence[str]) -> dict[str, list[str]]:
    """Return parameters by their modules."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(module_of(name), []).append(name)
    return found
