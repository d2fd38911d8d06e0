"""A `.bin`, `.pt` or `.pth` file, loaded without running anything that is pickled inside."""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from merganser.checkpoints.memory import StateDict
from merganser.errors import CheckpointError

SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
_NESTED = ("state_dict", "model_state_dict", "model", "module")


class TorchFile(StateDict):
    """Memory-mapped where the file's format allows. A dict nested under `state_dict` or `model` is unwrapped."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        super().__init__(_unwrap(_load(self.path), self.path), str(path))
        self.directory = self.path.parent

    def files(self) -> Sequence[Path]:
        return (self.path,)


def _load(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            zipped = file.read(2) == b"PK"
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except pickle.UnpicklingError as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(
            f"{path}: refused: the pickle wants to run code or is damaged ({reason}). "
            "If you trust its author, load it yourself and save it as safetensors."
        ) from None
    except (RuntimeError, EOFError, ValueError, KeyError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"{path}: not a readable torch file: {reason}") from None


def _unwrap(content: Any, path: Path) -> dict[str, Tensor]:
    for key in _NESTED:
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: holds a {type(content).__name__}, not a dict of tensors")
    if not any(isinstance(value, Tensor) for value in content.values()):
        raise CheckpointError(f"{path}: holds no tensors (keys: {', '.join(map(str, list(content)[:5]))} …)")
    return content
