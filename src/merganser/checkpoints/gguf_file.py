"""A GGUF file, dequantised tensor by tensor (extra `hf`)."""

from __future__ import annotations

import mmap
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from merganser.checkpoints.base import Checkpoint, Rows, TensorSpec, select_rows
from merganser.checkpoints.digests import digest_bytes, digest_sampled
from merganser.checkpoints.gguf_header import GGUFEntry, read_gguf_header
from merganser.checkpoints.lfs_pointers import refuse_lfs_pointer
from merganser.checkpoints.quantised import note_quantised
from merganser.checkpoints.reads import note_read
from merganser.errors import CheckpointError, require
from merganser.lazy import np, torch

if TYPE_CHECKING:
    from torch import Tensor

#: Entries that are decoded at once, and the bytes per entry that this takes besides the result.
_CHUNK, _SCRATCH = 1 << 18, 40
_EXACT = {"I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64", "F64": "float64"}
_FLOATS = ("F32", "F16", "BF16")


class GGUFFile(Checkpoint):
    """Tensors under GGUF's own names (`blk.0.attn_q.weight`), decoded to float32, except integers and float64."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.label = str(path)
        self.directory = self.path.parent
        self._gguf: Any = require("gguf", "hf")
        self._kinds = {int(kind): kind for kind in self._gguf.GGML_QUANT_SIZES}
        blocks = {int(kind): size for kind, size in self._gguf.GGML_QUANT_SIZES.items()}
        try:
            with self.path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self.header = read_gguf_header(self._map, blocks)
        except (OSError, ValueError) as error:  # ValueError also of an empty file, which cannot be mapped
            refuse_lfs_pointer(self.path)
            raise CheckpointError(f"{path}: not a readable GGUF file: {error}") from None
        if isinstance(parts := self.header.settings.get("split.count"), int) and parts > 1:
            raise CheckpointError(f"{path}: one of {parts} parts of a model; join them with `llama-gguf-split`")
        self._entries = self.header.tensors
        readable = {kind: self._readable(kind) for kind in {entry.kind for entry in self._entries.values()}}
        for name, entry in self._entries.items():
            if not readable[entry.kind]:
                kind = self._kinds[entry.kind].name
                raise CheckpointError(f"{path}: {name!r} is {kind}, which cannot be dequantised")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path,), {"label": self.label}

    def names(self) -> Sequence[str]:
        return list(self._entries)

    def spec(self, name: str) -> TensorSpec:
        entry = self._find(name)
        return TensorSpec(entry.shape, _EXACT.get(self._kinds[entry.kind].name, "float32"))

    def read(self, name: str, rows: Rows | None = None) -> Tensor:
        entry, spec = self._find(name), self.spec(name)
        if len(spec.shape) < 2 or not spec.numel:
            return select_rows(self.read_flat(name, (0, entry.rows[0])).view(spec.shape), rows)
        inner = entry.rows[0] // spec.shape[0]
        first, last = rows or (0, spec.shape[0])
        return self.read_flat(name, (first * inner, last * inner)).view(-1, *spec.shape[1:])

    def read_flat(self, name: str, rows: Rows) -> Tensor:
        """Return rows along the fastest axis of a tensor: those of a stack of matrices follow one another."""
        entry, spec = self._find(name), self.spec(name)
        note_read(self, name)
        if not spec.numel or rows[0] >= rows[1]:
            return torch.empty((0, *spec.shape[-1:]), dtype=spec.dtype, device="cpu")
        data = np.frombuffer(self._map, np.uint8, entry.stop - entry.start, entry.start).reshape(entry.rows)
        return self._values(data[rows[0] : rows[1]], entry.kind)

    def digest(self, name: str, algorithm: str) -> str:
        return digest_bytes(self.read_bytes(name), algorithm)

    def read_bytes(self, name: str) -> memoryview:
        """Return the bytes of a tensor as they are stored."""
        entry = self._find(name)
        return memoryview(self._map)[entry.start : entry.stop]

    def overhead(self, name: str, entries: int) -> int:
        return 4 * entries + _SCRATCH * max(_CHUNK, self.spec(name).shape[-1] if self.spec(name).shape else 1)

    def kind(self, name: str) -> str:
        """Return what a tensor is stored as, such as "Q4_K"."""
        return str(self._kinds[self._find(name).kind].name)

    def fingerprint(self) -> str:
        return digest_sampled(self._map, (f"{name} {entry}" for name, entry in self._entries.items()))

    def files(self) -> Sequence[Path]:
        return (self.path,)

    def notes(self) -> list[str]:
        forms = Counter(kind for name in self._entries if (kind := self.kind(name)) not in {*_EXACT, *_FLOATS})
        return [note_quantised(self.label, forms)] if forms else []

    def _values(self, data: Any, number: int) -> Tensor:
        kind = self._kinds[number]
        if kind.name in _EXACT:
            return torch.from_numpy(data.copy()).view(getattr(torch, _EXACT[kind.name]))
        block, size = self._gguf.GGML_QUANT_SIZES[kind]
        width = data.shape[-1] // size * block
        found = torch.empty((len(data), width), dtype=torch.float32, device="cpu")
        step = max(1, _CHUNK // max(1, width))
        for start in range(0, len(data), step):
            part = self._gguf.quants.dequantize(data[start : start + step], kind)
            found[start : start + step] = torch.from_numpy(np.array(part, np.float32))
        return found

    def _readable(self, kind: int) -> bool:
        """Return whether one block of zeros can be dequantised, which is the only way to ask the library."""
        if self._kinds[kind].name in _EXACT:
            return True
        size = self._gguf.GGML_QUANT_SIZES[self._kinds[kind]][1]
        try:
            self._gguf.quants.dequantize(np.zeros((1, size), np.uint8), self._kinds[kind])
        except NotImplementedError:
            return False
        return True

    def _find(self, name: str) -> GGUFEntry:
        if name not in self._entries:
            raise self.missing(name)
        return self._entries[name]
