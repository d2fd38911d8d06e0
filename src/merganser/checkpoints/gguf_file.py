"""A GGUF file, dequantised tensor by tensor (extra `hf`)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from merganser.checkpoints.base import Checkpoint, Rows, TensorSpec, select_rows
from merganser.errors import CheckpointError, require

_EXACT = {"I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64, "F64": torch.float64}


class GGUFFile(Checkpoint):
    """Tensors under GGUF's own names (`blk.0.attn_q.weight`), float32 whatever their quantisation; integers and
    float64 as they are."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.label = str(path)
        self.directory = self.path.parent
        self._gguf: Any = require("gguf", "hf")
        try:
            reader = self._gguf.GGUFReader(str(path))
        except Exception as error:  # the reader raises whatever its parsing runs into
            raise CheckpointError(f"{path}: not a readable GGUF file: {error}") from None
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        readable = {kind: self._readable(kind) for kind in {tensor.tensor_type for tensor in reader.tensors}}
        for name, tensor in self._tensors.items():
            if not readable[tensor.tensor_type]:
                raise CheckpointError(f"{path}: {name!r} is {tensor.tensor_type.name}, which cannot be dequantised")

    def names(self) -> Sequence[str]:
        return list(self._tensors)

    def spec(self, name: str) -> TensorSpec:
        # GGUF lists the fastest dimension first.
        tensor = self._find(name)
        dtype = _EXACT.get(tensor.tensor_type.name, torch.float32)
        return TensorSpec(tuple(int(n) for n in reversed(tensor.shape)), dtype)

    def read(self, name: str, rows: Rows | None = None) -> Tensor:
        tensor = self._find(name)
        spec = self.spec(name)
        shape = spec.shape
        data = tensor.data if rows is None or len(shape) < 2 else tensor.data[rows[0] : rows[1]]
        values = torch.tensor(self._plain(data, tensor.tensor_type), dtype=spec.dtype, device="cpu")
        if len(shape) < 2:
            return select_rows(values.view(shape), rows)
        return values.view(-1, *shape[1:])

    def files(self) -> Sequence[Path]:
        return (self.path,)

    def _plain(self, data: Any, kind: Any) -> Any:
        return data if kind.name in _EXACT else self._gguf.quants.dequantize(data, kind)

    def _readable(self, kind: Any) -> bool:
        """Whether one block of zeros can be dequantised: the library says so in no other way."""
        size = self._gguf.GGML_QUANT_SIZES[kind][1]
        try:
            self._plain(np.zeros((1, size), np.uint8), kind)
        except NotImplementedError:
            return False
        return True

    def _find(self, name: str) -> Any:
        if name not in self._tensors:
            raise self.missing(name)
        return self._tensors[name]
