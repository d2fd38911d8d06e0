"""Weights that are in memory already: a state dict or a module."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from merganser.checkpoints.base import Checkpoint, Rows, TensorSpec, select_rows
from merganser.errors import CheckpointError


class StateDict(Checkpoint):
    """A mapping from names to tensors. Names that share one storage are tied."""

    def __init__(self, tensors: Mapping[str, Tensor], label: str = "state dict") -> None:
        self.label = label
        self._tensors: dict[str, Tensor] = {}
        self._aliases: dict[str, str] = {}
        seen: dict[tuple[object, ...], str] = {}
        for name, tensor in tensors.items():
            if not isinstance(tensor, Tensor):
                raise CheckpointError(
                    f"{label}: {name!r} is a {type(tensor).__name__}, not a tensor; "
                    "a checkpoint maps names to tensors (is the state dict nested under a key?)"
                )
            plain = tensor.detach()
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
        return select_rows(self._find(name), rows)

    def aliases(self) -> Mapping[str, str]:
        return self._aliases

    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for name, tensor in self._tensors.items():
            digest.update(f"{name} {self.spec(name)}\n".encode())
            flat = tensor.reshape(-1)
            sample = flat[:: max(1, flat.numel() // 1024)].double() if flat.numel() else flat
            digest.update(sample.cpu().numpy().tobytes())
        return digest.hexdigest()

    def _find(self, name: str) -> Tensor:
        tensor = self._tensors.get(self._aliases.get(name, name))
        if tensor is None:
            raise self.missing(name)
        return tensor


class Module(StateDict):
    """An `nn.Module`: its parameters and persistent buffers, as `state_dict` names them."""

    def __init__(self, module: nn.Module, label: str | None = None) -> None:
        super().__init__(module.state_dict(keep_vars=True), label or type(module).__name__)
