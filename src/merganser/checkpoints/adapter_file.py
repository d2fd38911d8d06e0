"""The files of a PEFT adapter: its config, and how its tensors change each weight."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from merganser.checkpoints.adapter_updates import (
    AdapterUpdate,
    Ia3Update,
    LohaUpdate,
    LokrUpdate,
    LoraUpdate,
    TokenUpdate,
)
from merganser.checkpoints.base import Checkpoint
from merganser.checkpoints.json_file import read_object
from merganser.checkpoints.kinds import ADAPTER_CONFIG
from merganser.checkpoints.patterns import Pattern
from merganser.checkpoints.safetensors_file import SafetensorsFile
from merganser.checkpoints.torch_file import TorchFile
from merganser.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

PREFIX = "base_model.model."
_DEFAULT = 8  # PEFT's default of rank and alpha
#: Patterns without repetition, mostly names of modules, which Python matches quickly.
_LITERAL = re.compile(r"(\\\.|[\w.-])*")
_MAX_PATTERNS = 32
#: A tensor of an adapter: its module, its role there, and the part.
_PART = re.compile(
    r"(?P<module>.+)\.(?P<part>lora_(?:embedding_)?[A-Z]|lora_magnitude_vector|hada_\w+|lokr_\w+|ia3_l"
    r"|trainable_tokens_delta)(?P<of>\.weight|\.bias)?"
)
#: Kinds of adapters that are applied here; PEFT merges the others, layer by layer.
_OWN = {"LORA": "lora_", "LOHA": "hada_", "LOKR": "lokr_", "IA3": "ia3_"}
#: Settings of LoRA that make it more than W + s·B·A.
_VARIANTS = (
    "lora_bias",
    "use_qalora",
    "use_bdlora",
    "kasa_config",
    "velora_config",
    "monteclora_config",
    "alora_invocation_tokens",
    "arrow_config",
    "target_parameters",
    "megatron_config",
)
#: Initialisations that leave the base unchanged; PiSSA, OLoRA, CorDA, LoRA-GA and LoftQ subtract their factors from it.
_PLAIN_STARTS = ("gaussian", "eva", "orthogonal", "mica")


class AdapterFile:
    """A PEFT adapter: updates of weights and tensors saved whole, by the names of the model's parameters."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.config = _read_config(self.path)
        self.peft_type = str(self.config.get("peft_type", "LORA"))
        self._patterns = {
            key: _compile_all(self.config.get(key) or {}, f"{self.path / ADAPTER_CONFIG}: {key}")
            for key in ("rank_pattern", "alpha_pattern")
        }
        self.weights: Checkpoint = _open_weights(self.path)
        self.updates: dict[str, AdapterUpdate] = {}
        #: Parameters saved whole -> their names in the file.
        self.replaced: dict[str, str] = {}
        #: Why PEFT has to merge this adapter; empty if the updates describe it fully.
        self.needs_peft = self._find_reason_for_peft()
        if not self.needs_peft:
            self._index()

    def _find_reason_for_peft(self) -> str:
        if self.peft_type not in _OWN:
            return f"is a {self.peft_type} adapter"
        used = [key for key in _VARIANTS if self.config.get(key)]
        return f"uses {', '.join(used)}" if used else ""

    def _index(self) -> None:
        modules: dict[str, dict[str, str]] = {}
        for name in self.weights.names():
            bare = name.removeprefix(PREFIX)
            found = _PART.fullmatch(bare)
            if found is None:
                self._save_whole(bare, name)
            elif self._is_peculiar(name, found):
                self.needs_peft = f"has {name!r}"
                return
            else:
                modules.setdefault(found["module"].removesuffix(".token_adapter"), {})[found["part"]] = name
        for module, parts in sorted(modules.items()):
            self.updates[f"{module}.weight"] = self._update(module, parts)
            if self.peft_type == "IA3" and not self.updates[f"{module}.weight"].scales_inputs:  # type: ignore[attr-defined]
                self.updates[f"{module}.bias"] = Ia3Update(self.weights, parts, bias=True)
        if not self.updates and not self.replaced:
            raise CheckpointError(f"{self.path}: no factors of an adapter found")

    def _is_peculiar(self, name: str, found: re.Match[str]) -> bool:
        """Return whether a tensor has a meaning that no update here implements."""
        known = found["part"].startswith((_OWN[self.peft_type], "trainable_tokens")) and found["of"] != ".bias"
        return not known or (self.peft_type == "IA3" and len(self.weights.spec(name).shape) != 2)

    def _save_whole(self, bare: str, name: str) -> None:
        """Record a tensor that replaces the base's; of several copies, the trained one."""
        if ".original_module." in bare:
            return
        target = bare
        for infix in (".modules_to_save", ".token_adapter", ".base_layer"):
            target = target.replace(f"{infix}.", ".")
        if target not in self.replaced or ".modules_to_save." in bare:
            self.replaced[target] = name

    def _update(self, module: str, parts: Mapping[str, str]) -> AdapterUpdate:
        if "trainable_tokens_delta" in parts:
            return TokenUpdate(self.weights, parts, self._read_tokens(module, parts["trainable_tokens_delta"]))
        if self.peft_type == "IA3":
            return Ia3Update(self.weights, parts)
        if self.peft_type == "LOHA":
            self._check_parts(module, parts, ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"))
            return LohaUpdate(self.weights, parts, self._scale(module, "alpha"))
        if self.peft_type == "LOKR":
            for place in "12":
                if f"lokr_w{place}" not in parts:
                    self._check_parts(module, parts, (f"lokr_w{place}_a", f"lokr_w{place}_b"))
            return LokrUpdate(self.weights, parts, self._scale(module, "alpha"))
        embedding = any("embedding" in part for part in parts)
        names = ("lora_embedding_A", "lora_embedding_B") if embedding else ("lora_A", "lora_B")
        self._check_parts(module, parts, names)
        if self.config.get("use_dora") and "lora_magnitude_vector" not in parts:
            raise CheckpointError(f"{self.path}: uses DoRA, but {module!r} has no lora_magnitude_vector")
        for name, axis in zip(names, (0, 1), strict=True):
            self._check_rank(module, parts[name], axis)
        return LoraUpdate(self.weights, parts, self._scale(module, "lora_alpha"), embedding)

    def _check_parts(self, module: str, parts: Mapping[str, str], needed: tuple[str, ...]) -> None:
        lacking = [part for part in needed if part not in parts]
        if lacking:
            there = next(iter(parts.values()))
            partner = there.replace(_PART.fullmatch(there)["part"], lacking[0])  # type: ignore[index]
            raise CheckpointError(f"{self.path}: {there!r} has no partner {partner!r}")

    def _check_rank(self, module: str, name: str, axis: int) -> None:
        rank, shape = self._read_setting("r", "rank_pattern", module), self.weights.spec(name).shape
        stored = shape[axis] if len(shape) > 1 else 0
        if stored != rank or not rank:
            raise CheckpointError(f"{self.path}: {name!r} has rank {stored}, the config says {rank}")

    def _read_tokens(self, module: str, name: str) -> tuple[int, ...]:
        """Return the ids of the tokens whose rows were trained."""
        given = self.config.get("trainable_token_indices")
        if isinstance(given, dict):
            given = next((rows for key, rows in given.items() if f".{module}".endswith(f".{key}")), None)
            if (
                given is None and len(self.config["trainable_token_indices"]) == 1
            ):  # a head that is tied to the embedding
                given = next(iter(self.config["trainable_token_indices"].values()))
        if not isinstance(given, list) or not all(isinstance(each, int) and each >= 0 for each in given):
            raise CheckpointError(f"{self.path}: has {name!r}, but its config does not number the tokens of {module!r}")
        if self.weights.spec(name).shape[0] != len(given):
            raise CheckpointError(
                f"{self.path}: {name!r} has {self.weights.spec(name).shape[0]} rows, its config numbers {len(given)}"
            )
        return tuple(given)

    def embeddings(self) -> set[str]:
        """Return the modules that the adapter knows to be embeddings."""
        bare = [name.removeprefix(PREFIX) for name in self.weights.names()]
        ends = (".lora_embedding_A", ".token_adapter.trainable_tokens_delta")
        return {name.removesuffix(end) for name in bare for end in ends if name.endswith(end)}

    def trains_whole(self, name: str) -> bool:
        """Return whether a tensor saved whole was trained; others were only saved because rows were added."""
        module, saved = name.rpartition(".")[0], self.config.get("modules_to_save") or ()
        listed = any(isinstance(each, str) and f".{module}".endswith(f".{each}") for each in saved)
        return listed or ".modules_to_save" in self.replaced[name]

    def _scale(self, module: str, key: str) -> float:
        rank = self._read_setting("r", "rank_pattern", module)
        alpha = self._read_setting(key, "alpha_pattern", module)
        if not rank:
            raise CheckpointError(f"{self.path}: {module!r} has rank 0 in its config")
        return alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)

    def _read_setting(self, key: str, patterns: str, module: str) -> float:
        """Return a number of the config, or that of the first pattern that matches the module."""
        given = self.config.get(patterns) or {}
        try:
            found = next((pattern for pattern, matches in self._patterns[patterns].items() if matches(module)), None)
        except ValueError as error:
            raise CheckpointError(f"{self.path}: {patterns}: {error}") from None
        where = key if found is None else f"{patterns}[{found!r}]"
        value = self.config.get(key, _DEFAULT) if found is None else given[found]
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise CheckpointError(f"{self.path}: {where} is {value!r} in its config, not a number")
        return value

    def factors(self, name: str) -> tuple[Tensor, Tensor]:
        """Return (B, A) in float32, oriented so that the update of the stored weight is s·B·A."""
        return self.low_rank(name).factors(bool(self.config.get("fan_in_fan_out")))

    def low_rank(self, name: str) -> LoraUpdate:
        """Return the update of a weight, which must be of the form W + s·B·A.

        Raises:
            CheckpointError: If it has another form.
        """
        update = self.updates[name]
        if not isinstance(update, LoraUpdate) or "lora_magnitude_vector" in update.parts:
            kind = "DoRA" if isinstance(update, LoraUpdate) else type(update).__name__.removesuffix("Update")
            raise CheckpointError(f"{self.path}: {name!r} is changed by {kind}, not by a low-rank update")
        return update


def _read_config(path: Path) -> dict[str, Any]:
    file = path / ADAPTER_CONFIG
    if path.is_dir() and not file.exists():
        raise CheckpointError(f"{path}: not an adapter: it has no {ADAPTER_CONFIG}")
    config = read_object(file)
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower() not in _PLAIN_STARTS:
        raise CheckpointError(
            f"{file}: init_lora_weights is {start!r}, which may change the base's weights, so that its factors fit "
            "another base; save it with peft's path_initial_model_for_weight_conversion, or merge it with peft first"
        )
    if config.get("layer_replication"):
        raise CheckpointError(f"{file}: replicates layers of the base, which needs another config; merge it with peft")
    return config


def _open_weights(path: Path) -> Checkpoint:
    if (path / "adapter_model.safetensors").is_file():
        return SafetensorsFile(path / "adapter_model.safetensors")
    if (path / "adapter_model.bin").is_file():
        return TorchFile(path / "adapter_model.bin")
    raise CheckpointError(f"{path}: has an adapter_config.json but no adapter_model.safetensors")


def _compile_all(patterns: Any, where: str) -> dict[str, Callable[[str], object]]:
    """Compile PEFT's patterns: each matches the whole name of a module, or its end after a dot."""
    if not isinstance(patterns, dict):
        raise CheckpointError(f"{where}: expected a JSON object")
    if sum(not _LITERAL.fullmatch(pattern) for pattern in patterns) > _MAX_PATTERNS:
        raise CheckpointError(f"{where}: more than {_MAX_PATTERNS} regular expressions; name the modules instead")
    found: dict[str, Callable[[str], object]] = {}
    for pattern in patterns:
        whole = rf"(.*\.)?({pattern})"
        try:
            found[pattern] = re.compile(whole).fullmatch if _LITERAL.fullmatch(pattern) else Pattern(whole).matches
        except ValueError as error:
            raise CheckpointError(f"{where}: {pattern!r} is not a supported regular expression: {error}") from None
    return found
