"""A PEFT LoRA adapter over its base, applied tensor by tensor: W + s·B·A, with no full copy anywhere."""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from merganser.checkpoints.base import Checkpoint, Rows, TensorSpec, View, select_rows
from merganser.checkpoints.json_file import read_object
from merganser.checkpoints.patterns import Pattern
from merganser.checkpoints.safetensors_file import SafetensorsFile
from merganser.checkpoints.ties import check_head_is_known, check_separable, ties
from merganser.checkpoints.torch_file import TorchFile
from merganser.errors import CheckpointError, did_you_mean
from merganser.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

_PREFIX = "base_model.model."
_EMBEDDING = ".lora_embedding_A"
_DEFAULT = 8  # PEFT's, of rank and alpha alike
CONFIG = "adapter_config.json"
#: Patterns that repeat nothing, most often the name of a module: Python matches them quickly, however many they are.
_LITERAL = re.compile(r"(\\\.|[\w.-])*")
_MAX_PATTERNS = 32
_REFUSED = {
    "use_dora": "DoRA",
    "lora_bias": "LoRA biases",
    "use_qalora": "QALoRA",
    "use_bdlora": "BD-LoRA",
    "kasa_config": "KaSA",
    "alora_invocation_tokens": "aLoRA",
    "arrow_config": "Arrow",
    "trainable_token_indices": "trained rows of an embedding",
}
#: Initialisations that leave the base alone; PiSSA, OLoRA, CorDA, LoRA-GA and LoftQ take their factors out of it.
_PLAIN_STARTS = ("gaussian", "eva", "orthogonal", "mica")


@dataclass(frozen=True)
class LoraUpdate:
    """One module's update s·B·A, as names in the adapter file."""

    a: str
    b: str
    scale: float


class AdapterFile:
    """The factors of a LoRA adapter by the name of the weight they change."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.config = _read_config(self.path)
        self._patterns = {
            key: _compile_all(self.config.get(key) or {}, f"{self.path / CONFIG}: {key}")
            for key in ("rank_pattern", "alpha_pattern")
        }
        self.weights: Checkpoint = _open_weights(self.path)
        self.updates, self.replaced = self._index()

    def _index(self) -> tuple[dict[str, LoraUpdate], dict[str, str]]:
        updates: dict[str, LoraUpdate] = {}
        replaced: dict[str, str] = {}
        names = set(self.weights.names())
        for name in sorted(names):
            bare = name.removeprefix(_PREFIX)
            if ".original_module." in bare:
                raise CheckpointError(
                    f"{self.path}: has {name!r}, a copy of what it trains; merge the adapter with peft first"
                )
            for a, b in ((".lora_A.", ".lora_B."), (_EMBEDDING, ".lora_embedding_B")):
                if a in name:
                    other = name.replace(a, b)
                    if other not in names:
                        raise CheckpointError(f"{self.path}: {name!r} has no partner {other!r}")
                    module = bare.split(a)[0]
                    updates[f"{module}.weight"] = LoraUpdate(name, other, self._scale(module, name, other))
                    break
            else:
                if ".lora_" not in name:
                    replaced[bare.replace(".modules_to_save", "").replace(".base_layer", "")] = name
        if not updates and not replaced:
            raise CheckpointError(f"{self.path}: no LoRA factors found")
        return updates, replaced

    def trains_whole(self, name: str) -> bool:
        """Whether a whole tensor has been trained; others are the base's, saved along because rows were added."""
        module, saved = name.rpartition(".")[0], self.config.get("modules_to_save") or ()
        listed = any(isinstance(each, str) and f".{module}".endswith(f".{each}") for each in saved)
        return listed or ".modules_to_save" in self.replaced[name]

    def _scale(self, module: str, a: str, b: str) -> float:
        rank = self._setting("r", "rank_pattern", module)
        alpha = self._setting("lora_alpha", "alpha_pattern", module)
        for name, axis in ((a, 0), (b, 1)):
            shape = self.weights.spec(name).shape
            stored = shape[axis] if len(shape) > 1 else 0
            if stored != rank or not rank:
                raise CheckpointError(f"{self.path}: {name!r} has rank {stored}, the config says {rank}")
        return alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)

    def _setting(self, key: str, patterns: str, module: str) -> float:
        """A number of the config, or that of the first pattern that fits the module."""
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
        """(B, A) in float32, oriented so that the update of the weight as stored is s·B·A."""
        update = self.updates[name]
        a, b = self.weights.read(update.a).float(), self.weights.read(update.b).float()
        if _EMBEDDING in update.a or self.config.get("fan_in_fan_out"):
            return a.T, b.T
        return b, a

    def delta(self, name: str, rows: Rows | None = None) -> Tensor:
        """s·B·A in float32 for the weight `name`, or its rows."""
        b, a = self.factors(name)
        b = select_rows(b, rows)
        product = b @ a if a.dim() == 2 else torch.einsum("or,r...->o...", b.flatten(1), a)
        return product * self.updates[name].scale

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of the weight this update fits."""
        a, b = self.weights.spec(self.updates[name].a).shape, self.weights.spec(self.updates[name].b).shape
        turned = _EMBEDDING in self.updates[name].a or self.config.get("fan_in_fan_out")
        return (a[1], b[0]) if turned else (b[0], *a[1:])


class Adapted(View):
    """`base + adapter` as a checkpoint. Changed tensors are read in float32: they are rounded once, when written."""

    def __init__(self, base: Checkpoint, adapter: AdapterFile) -> None:
        super().__init__(base, f"{base.label}+{adapter.path}")
        self.adapter = adapter
        self._ties = ties(base)
        self._updates = {self._target(name): name for name in adapter.updates}
        self._replaced = {self._target(name): name for name in adapter.replaced}
        #: Names that the base ties and the adapter gives weights of their own -> what they were tied to.
        self.untied = {tied: stored for tied, stored in self._ties.items() if self._separates(tied, stored)}
        self._tied = {tied: stored for tied, stored in self.source.aliases().items() if tied not in self.untied}
        for pair in self._ties.items():
            for name, other in (pair, pair[::-1]):  # one tensor of the base, saved under one of its names
                if name in self._replaced and not adapter.trains_whole(self._replaced[name]):
                    self._replaced.setdefault(other, self._replaced[name])
        self._names = [*self.source.names(), *(name for name in self.untied if name not in self.source.names())]
        for target in (*self._updates, *self._replaced):
            if self._trained(target) and target not in {*self._ties, *self._ties.values()}:
                check_head_is_known(base, target, str(adapter.path))
        for target, name in self._updates.items():
            expected, found = self.spec(target).shape, adapter.shape(name)
            if found != expected:
                raise CheckpointError(f"{adapter.path}: {name!r} fits {list(found)}, the base has {list(expected)}")

    def _target(self, name: str) -> str:
        """The base's name of a weight: adapters of a `ForCausalLM` class may sit over a bare model and vice versa."""
        for candidate in (name, name.removeprefix("model."), f"model.{name}"):
            if candidate in self.source or candidate in self._ties:
                return candidate
        raise CheckpointError(
            f"{self.adapter.path}: changes {name!r}, which {self.source.label} does not have"
            f"{did_you_mean(name, self.source.names())}"
        )

    def _separates(self, tied: str, stored: str) -> bool:
        """Whether two names of one tensor have different weights with the adapter."""
        trained = [name for name in (tied, stored) if self._trained(name)]
        both = [self._replaced[name] for name in (tied, stored) if name in self._replaced]
        same = len(both) == 2 and not {tied, stored} & self._updates.keys() and self._equal(*both)
        if same or (not trained and len(both) < 2):
            return False
        check_separable(self.source, tied, stored, str(self.adapter.path))
        return True

    def _trained(self, target: str) -> bool:
        whole = self._replaced.get(target)
        return target in self._updates or (whole is not None and self.adapter.trains_whole(whole))

    def _equal(self, one: str, other: str) -> bool:
        a, b = (self.adapter.weights.read(self.adapter.replaced[name]) for name in (one, other))
        return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)

    def names(self) -> Sequence[str]:
        return self._names

    def aliases(self) -> Mapping[str, str]:
        return self._tied

    def spec(self, name: str) -> TensorSpec:
        """A tensor saved whole may have rows for tokens that were added."""
        stored = self._tied.get(name, name)
        begun = self.untied.get(stored, stored)
        spec = self.source.spec(begun)
        whole = self._whole(stored)
        return spec if whole is None else TensorSpec(self.adapter.weights.spec(whole).shape, spec.dtype)

    def read(self, name: str, rows: Rows | None = None) -> Tensor:
        stored = self._tied.get(name, name)
        whole = self._whole(stored)
        if whole is None:
            tensor = self.source.read(self.untied.get(stored, stored), rows)
        else:
            tensor = self.adapter.weights.read(whole, rows)
        if stored in self._updates:
            return tensor.float() + self.adapter.delta(self._updates[stored], rows)
        return tensor

    def _whole(self, stored: str) -> str | None:
        """The name in the adapter's file of a tensor that takes the place of the base's."""
        whole = self._replaced.get(stored)
        return None if whole is None else self.adapter.replaced[whole]

    def fingerprint(self) -> str:
        own = f"{self.source.fingerprint()} {self.adapter.weights.fingerprint()} {self.adapter.config}"
        return hashlib.sha256(own.encode()).hexdigest()

    def files(self) -> Sequence[Path]:
        return [*self.source.files(), *self.adapter.weights.files()]


def separates_head(checkpoint: Checkpoint) -> bool:
    """Whether an adapter gives a head of its own to a base whose embedding was its head."""
    while isinstance(checkpoint, View):
        if isinstance(checkpoint, Adapted) and checkpoint.untied:
            return True
        checkpoint = checkpoint.source
    return False


def is_adapter(path: Path) -> bool:
    return (path / CONFIG).is_file()


def _read_config(path: Path) -> dict[str, Any]:
    file = path / CONFIG
    config = read_object(file)
    if config.get("peft_type", "LORA") != "LORA":
        raise CheckpointError(f"{file}: a {config['peft_type']} adapter; only LoRA can be applied to weights")
    for key, what in _REFUSED.items():
        if config.get(key):
            raise CheckpointError(f"{file}: uses {what}, which is not a plain low-rank update")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower() not in _PLAIN_STARTS:
        raise CheckpointError(
            f"{file}: init_lora_weights is {start!r}, which is not known to leave the base's weights as they are: its "
            "factors fit another base; save it with peft's path_initial_model_for_weight_conversion, or merge it with "
            "peft first"
        )
    if config.get("bias", "none") != "none" or config.get("layer_replication"):
        raise CheckpointError(f"{file}: trains biases or replicates layers; merge it with peft first")
    return config


def _open_weights(path: Path) -> Checkpoint:
    if (path / "adapter_model.safetensors").is_file():
        return SafetensorsFile(path / "adapter_model.safetensors")
    if (path / "adapter_model.bin").is_file():
        return TorchFile(path / "adapter_model.bin")
    raise CheckpointError(f"{path}: has an adapter_config.json but no adapter_model.safetensors")


def _compile_all(patterns: Any, where: str) -> dict[str, Callable[[str], object]]:
    """What PEFT matches with the name of a module: a pattern is the whole of it, or its end after a dot."""
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
            raise CheckpointError(
                f"{where}: {pattern!r} is not a regular expression that is matched: {error}"
            ) from None
    return found
