"""A GGUF file, dequantised tensor by tensor (extra `hf`)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from merganser.checkpoints.base import Checkpoint, Rows, TensorSpec, select_rows
from merganser.errors import CheckpointError, require


class GGUFFile(Checkpoint):
    """Tensors under GGUF's own names (`blk.0.attn_q.weight`), float32 whatever their quantisation."""

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

    def names(self) -> Sequence[str]:
        return list(self._tensors)

    def spec(self, name: str) -> TensorSpec:
        # GGUF lists the fastest dimension first.
        return TensorSpec(tuple(int(n) for n in reversed(self._find(name).shape)), torch.float32)

    def read(self, name: str, rows: Rows | None = None) -> Tensor:
        tensor = self._find(name)
        shape = self.spec(name).shape
        data = tensor.data if rows is None or len(shape) < 2 else tensor.data[rows[0] : rows[1]]
        values = torch.tensor(self._gguf.quants.dequantize(data, tensor.tensor_type), dtype=torch.float32)
        if len(shape) < 2:
            return select_rows(values.view(shape), rows)
        return values.view(-1, *shape[1:])

    def _find(self, name: str) -> Any:
        if name not in self._tensors:
            raise self.missing(name)
        return self._tensors[name]
