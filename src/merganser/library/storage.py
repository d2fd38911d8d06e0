"""An expert on disk: per matrix its factors u · diag(s) · vᵀ, for every other changed tensor the tensor itself.

Convolution kernels are matrices too, output × (input · window); the base knows their shape.

One safetensors file per expert, with the keys `NAME::u`, `NAME::s`, `NAME::v` or `NAME::full`. Column scales of int8
factors are folded into s, so that the same product rebuilds the task matrix whatever the dtype. Sizes follow from
shapes and ranks alone: the header has a fixed room, whatever the ranks turn out to be.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from merganser.checkpoints.base import Rows, TensorSpec, select_rows
from merganser.checkpoints.safetensors_file import CODES, SafetensorsFile
from merganser.engine.disk import Disk
from merganser.errors import CheckpointError
from merganser.kernels.spectra import Factors
from merganser.lazy import torch
from merganser.library.unfolding import as_matrix
from merganser.methods.matrices import matrix_shape

if TYPE_CHECKING:
    from torch import Tensor

FACTOR_DTYPES = ("float32", "bfloat16", "float16", "int8")
DISK = Disk()
Write = Callable[[int, memoryview], None]
_LARGEST = 10**16
_PIECE = 1 << 18


@dataclass(frozen=True)
class Slot:
    """How one changed tensor of an expert is kept: at a rank, or whole (`rank` None)."""

    name: str
    spec: TensorSpec
    rank: int | None

    def entries(self, dtype: torch.dtype) -> dict[str, TensorSpec]:
        if self.rank is None:
            return {f"{self.name}::full": self.spec}
        if self.rank == 0:
            return {}
        d, m = matrix_shape(self.spec.shape)
        return {
            f"{self.name}::u": TensorSpec((d, self.rank), dtype),
            f"{self.name}::s": TensorSpec((self.rank,), torch.float32),
            f"{self.name}::v": TensorSpec((m, self.rank), dtype),
        }

    def nbytes(self, dtype: torch.dtype) -> int:
        return sum(spec.nbytes for spec in self.entries(dtype).values())


def component_bytes(spec: TensorSpec, dtype: torch.dtype) -> int:
    """What one more component of a matrix costs."""
    return sum(matrix_shape(spec.shape)) * dtype.itemsize + 4


def encode(factors: Factors, dtype: torch.dtype, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """(u, s, v) as stored, filled up with empty components to exactly `rank`."""
    u, s, v = factors.truncate(rank)
    if dtype == torch.int8:
        u, u_scale = _to_int8(u)
        v, v_scale = _to_int8(v)
        s = s * u_scale * v_scale
    missing = rank - s.numel()
    u, v = (torch.nn.functional.pad(part.to(dtype), (0, missing)) for part in (u, v))
    return u, torch.nn.functional.pad(s.float(), (0, missing)), v


def _to_int8(columns: Tensor) -> tuple[Tensor, Tensor]:
    scale = columns.abs().amax(dim=0).clamp(min=1e-30) / 127
    return (columns / scale).round(), scale


def product(u: Tensor, s: Tensor, v: Tensor) -> Tensor:
    """u · diag(s) · vᵀ of stored factors, in float32."""
    return (u.float() * s) @ v.float().T


def normalized(u: Tensor, s: Tensor, v: Tensor) -> Factors:
    """Stored factors as unit vectors and singular values, in float64, empty components left out."""
    u, s, v = u.double(), s.double(), v.double()
    u_norm, v_norm = u.norm(dim=0), v.norm(dim=0)
    there = (s * u_norm * v_norm) > 0
    u_norm, v_norm = u_norm[there], v_norm[there]
    return Factors(u[:, there] / u_norm, s[there] * u_norm * v_norm, v[:, there] / v_norm)


def header_room(slots: Iterable[tuple[str, TensorSpec]], metadata: Mapping[str, str]) -> int:
    """Bytes that hold the header of these tensors at any ranks."""
    text: dict[str, object] = {"__metadata__": dict(metadata)}
    for name, spec in slots:
        for part in "usv":
            text[f"{name}::{part}"] = {"dtype": "BF16", "shape": [_LARGEST] * 2, "data_offsets": [_LARGEST] * 2}
        whole = {"dtype": CODES[spec.element.name], "shape": list(spec.shape), "data_offsets": [_LARGEST] * 2}
        text[f"{name}::full"] = whole
    return 8 + math.ceil(len(json.dumps(text, separators=(",", ":"))) / 8) * 8


def write_expert(
    path: Path,
    slots: Iterable[Slot],
    dtype: torch.dtype,
    metadata: Mapping[str, str],
    room: int,
    tensors: Iterator[tuple[Slot, tuple[Tensor, ...]]],
) -> str:
    """Write `tensors` (each as the entries of its slot say) and return the file's sha256."""
    entries = {key: spec for slot in slots for key, spec in slot.entries(dtype).items()}
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    places: dict[str, int] = {}
    end = 0
    # Wide types first, so that every tensor is aligned to its own item size.
    for key, spec in sorted(entries.items(), key=lambda item: -item[1].dtype.itemsize):
        places[key] = room + end
        described = {"dtype": CODES[spec.element.name], "shape": list(spec.shape)}
        header[key] = described | {"data_offsets": [end, end + spec.nbytes]}
        end += spec.nbytes
    text = json.dumps(header, separators=(",", ":")).encode().ljust(room - 8)

    def fill(write: Write) -> None:
        write(0, memoryview(len(text).to_bytes(8, "little") + text))
        for slot, parts in tensors:
            for key, part in zip(slot.entries(dtype), parts, strict=True):
                assert (tuple(part.shape), part.dtype) == (entries[key].shape, entries[key].dtype), key
                write(places[key], part.contiguous().view(-1).view(torch.uint8).numpy().data)

    return write_whole(path, room + end, fill)


def write_whole(path: Path, size: int, fill: Callable[[Write], object]) -> str:
    """Write a file of `size` bytes that appears under its name, or replaces the one there, complete and synced.

    Args:
        path: The file.
        size: How many bytes it has.
        fill: Called with a function that writes bytes at an offset.

    Returns:
        The sha256 of the file.
    """
    partial = partial_of(path)
    handle = DISK.create(partial, size)
    try:
        fill(lambda offset, data: DISK.write_at(handle, data, offset, partial))
        DISK.sync(handle, partial)
    finally:
        os.close(handle)
    digest = checksum(partial)
    DISK.rename(partial, path)
    return digest


def partial_of(path: Path) -> Path:
    """Where a file is written before it takes its name."""
    return path.with_name(f"{path.name}.partial")


def delete(path: Path) -> None:
    """Remove a file for good."""
    DISK.before("remove", path)
    path.unlink()
    DISK.sync_directory(path.parent)


class ExpertFile:
    """The stored tensors of one expert, memory-mapped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.weights = SafetensorsFile(path)
        self.kinds: dict[str, Literal["factors", "full"]] = {}
        for key in self.weights.names():
            name, separator, part = key.rpartition("::")
            if not separator or part not in ("u", "s", "v", "full"):
                raise CheckpointError(f"{path}: {key!r} is no part of an expert; the file is not one of ours")
            self.kinds[name] = "full" if part == "full" else "factors"

    def spec(self, name: str) -> TensorSpec:
        """Shape of a changed tensor, or of its matrix where factors are kept; the dtype is the expert's own where the
        tensor is kept whole."""
        if self.kinds[name] == "full":
            return self.weights.spec(f"{name}::full")
        d, m = (self.weights.spec(f"{name}::{part}").shape[0] for part in "uv")
        return TensorSpec((d, m), torch.float32)

    def rank(self, name: str) -> int:
        return self.weights.spec(f"{name}::s").shape[0]

    def full(self, name: str, rows: Rows | None = None) -> Tensor:
        return self.weights.read(f"{name}::full", rows)

    def factors(self, name: str) -> Factors:
        u, s, v = (self.weights.read(f"{name}::{part}") for part in "usv")
        return normalized(u, s, v)

    def product(self, name: str) -> Tensor:
        return product(*(self.weights.read(f"{name}::{part}") for part in "usv"))

    def added_to(self, base: Tensor, name: str, rows: Rows | None = None) -> Tensor:
        """base + u · diag(s) · vᵀ in the base's shape, or these rows of it, in at least float32."""
        u, s, v = (self.weights.read(f"{name}::{part}") for part in "usv")
        shape, base = base.shape, as_matrix(base)
        out = torch.empty(base.shape, dtype=torch.promote_types(base.dtype, torch.float32))
        left, right = (select_rows(u, rows).float() * s).to(out.dtype), v.to(out.dtype).T
        # In pieces that stay in cache between the copy and the product.
        step = max(1, _PIECE // max(1, base.shape[1]))
        for start in range(0, base.shape[0], step):
            piece = slice(start, start + step)
            out[piece].copy_(base[piece]).addmm_(left[piece], right)
        return out.view(shape)


def checksum(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()
