"""Weights in memory: a state dict or a module."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from merganser.checkpoints.base import Checkpoint, Rows, TensorSpec, select_rows
from merganser.checkpoints.reads import note_read
from merganser.errors import CheckpointError
from merganser.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor, nn


class StateDict(Checkpoint):
    """A mapping from names to tensors. Names that share one storage are tied."""

    def __init__(self, tensors: Mapping[str, Tensor], label: str = "state dict") -> None:
        self.label = label
        self._tensors: dict[str, Tensor] = {}
        self._aliases: dict[str, str] = {}
        seen: dict[tuple[object, ...], str] = {}
        for name, tensor in tensors.items():
            plain = _require_plain(name, tensor, label)
            key = (plain.device, plain.data_ptr(), plain.dtype, plain.shape, plain.stride())
            if plain.numel() and key in seen:
                self._aliases[name] = seen[key]
            else:
                seen[key] = name
                self._tensors[name] = plain

    def names(self) -> Sequence[str]:
        return list(self._tensors)

    def spec(self, name: str) -> TensorSpec:
        tensor = self._find(name)
        return TensorSpec(tuple(tensor.shape), tensor.dtype)

    def read(self, name: str, rows: Rows | None = None) -> Tensor:
        note_read(self, self._aliases.get(name, name))
        return select_rows(self._find(name), rows)

    def aliases(self) -> Mapping[str, str]:
        return self._aliases

    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for name, tensor in self._tensors.items():
            digest.update(f"{name} {self.spec(name)}\n".encode())
            flat = tensor.reshape(-1)
            sample = flat[:: max(1, flat.numel() // 1024)]
            real = torch.view_as_real(sample) if sample.is_complex() else sample
            digest.update((real.double() if real.numel() else real).cpu().numpy().tobytes())
        return digest.hexdigest()

    def _find(self, name: str) -> Tensor:
        tensor = self._tensors.get(self._aliases.get(name, name))
        if tensor is None:
            raise self.missing(name)
        return tensor


def _require_plain(name: object, tensor: object, label: str) -> Tensor:
    """Return the tensor of a name; refuse it unless it is an ordinary dense tensor with values."""
    if not isinstance(name, str):
        raise CheckpointError(f"{label}: the key {name!r} is of type {type(name).__name__}, not the name of a tensor")
    if not isinstance(tensor, torch.Tensor):
        raise CheckpointError(
            f"{label}: {name!r} is of type {type(tensor).__name__}, but a checkpoint maps names to tensors"
            f" ({_suggest_tensor(name, tensor)})"
        )
    if torch.nn.parameter.is_lazy(tensor):
        raise CheckpointError(f"{label}: {name!r} has no values yet; call the module once")
    kinds = {
        "a meta tensor, which has no values": tensor.is_meta,
        "a quantised tensor; dequantise the model first": tensor.is_quantized,
        "a nested tensor; store its parts": tensor.is_nested,
        "a sparse tensor; store it dense": tensor.layout != torch.strided,
    }
    if refused := next((kind for kind, found in kinds.items() if found), None):
        raise CheckpointError(f"{label}: {name!r} is {refused}")
    return tensor.detach().resolve_conj().resolve_neg()


def _suggest_tensor(name: str, value: object) -> str:
    """Return what to do about a value that is not a tensor."""
    if name.endswith("_extra_state"):  # what modules save besides tensors
        return "leave it out of the state dict"
    if isinstance(value, Mapping):
        return "is the state dict nested under a key?"
    if hasattr(value, "__array__"):
        return "convert it with torch.from_numpy"
    return "convert it with torch.tensor, or leave it out"


class Module(StateDict):
    """An `nn.Module`: its parameters and persistent buffers, as `state_dict` names them."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module.state_dict(keep_vars=True), type(module).__name__)
