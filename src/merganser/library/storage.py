"""An expert on disk: one safetensors file, written at once.

A matrix has its factors u · diag(s) · vᵀ under the keys `NAME::u`, `NAME::s` and `NAME::v`; any changed tensor may be
stored whole as `NAME::full`. Column scales of int8 factors are folded into s, so that the same product rebuilds the
task matrix for every dtype. Sizes follow from shapes and ranks alone: the header has a fixed size for all ranks.
Convolution kernels are matrices too, output × (input · window); the base has their shape.

In libraries that mix codes a tensor is `NAME::code`, a blob of `codes.coding`, or `NAME::residual`, a blob of the
residual after the shared part. The metadata list dropped tensors with their energies.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from merganser.checkpoints.base import TensorSpec
from merganser.checkpoints.digests import digest_file
from merganser.checkpoints.safetensors_file import CODES
from merganser.engine.disk import Disk
from merganser.kernels.spectra import Factors, top_svd
from merganser.lazy import torch
from merganser.methods.matrices import matrix_shape

if TYPE_CHECKING:
    from torch import Tensor

    from merganser.library.manifest import ExpertRecord, StoredFile

FACTOR_DTYPES = ("float32", "bfloat16", "float16", "int8")
DISK = Disk()
Write = Callable[[int, memoryview], None]
_LARGEST = 10**16


@dataclass(frozen=True)
class Slot:
    """How one changed tensor of an expert is stored: at a rank, or whole (`rank` None)."""

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


def component_bytes(spec: TensorSpec, dtype: torch.dtype) -> int:
    """Return the bytes of one more component of a matrix."""
    return sum(matrix_shape(spec.shape)) * dtype.itemsize + 4


def encode(factors: Factors, dtype: torch.dtype, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return (u, s, v) as stored, padded with empty components to exactly `rank`."""
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
    """Return u · diag(s) · vᵀ of stored factors, in float32."""
    return (u.float() * s) @ v.float().T


def normalize_factors(u: Tensor, s: Tensor, v: Tensor) -> Factors:
    """Return stored factors as unit vectors and singular values, in float64, without empty components."""
    u, s, v = u.double(), s.double(), v.double()
    u_norm, v_norm = u.norm(dim=0), v.norm(dim=0)
    there = (s * u_norm * v_norm) > 0
    u_norm, v_norm = u_norm[there], v_norm[there]
    return Factors(u[:, there] / u_norm, s[there] * u_norm * v_norm, v[:, there] / v_norm)


def orthonormalize_factors(u: Tensor, s: Tensor, v: Tensor) -> Factors:
    """Return the singular value decomposition of u · diag(s) · vᵀ, whose rounded columns are not orthogonal."""
    (left, upper), (right, lower) = torch.linalg.qr(u.double() * s), torch.linalg.qr(v.double())
    core = top_svd(upper @ lower.T, len(s))
    return Factors(left @ core.u, core.s, right @ core.v)


def header_room(slots: Iterable[tuple[str, TensorSpec]], metadata: Mapping[str, str]) -> int:
    """Return the bytes that hold the header of these tensors at any ranks."""
    text: dict[str, object] = {"__metadata__": dict(metadata)}
    for name, spec in slots:
        for part in "usv":
            text[f"{name}::{part}"] = {"dtype": "BF16", "shape": [_LARGEST] * 2, "data_offsets": [_LARGEST] * 2}
        whole = {"dtype": CODES[spec.element.name], "shape": list(spec.shape), "data_offsets": [_LARGEST] * 2}
        text[f"{name}::full"] = whole
    return 8 + math.ceil(len(json.dumps(text, separators=(",", ":"))) / 8) * 8


def write_tensors(
    path: Path,
    entries: Mapping[str, TensorSpec],
    metadata: Mapping[str, str],
    tensors: Iterable[tuple[str, Tensor]],
    room: int | None = None,
) -> str:
    """Write a safetensors file, tensor by tensor.

    Args:
        path: The file.
        entries: The tensors of the file, by key.
        metadata: The metadata of its header.
        tensors: Every entry once, in any order.
        room: Bytes of the header; by default its minimum.

    Returns:
        The sha256 of the file.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    begins: dict[str, int] = {}
    end = 0
    # Wide types first, so that every tensor is aligned to its item size.
    for key, spec in sorted(entries.items(), key=lambda item: -item[1].dtype.itemsize):
        begins[key] = end
        described = {"dtype": CODES[spec.element.name], "shape": list(spec.shape)}
        header[key] = described | {"data_offsets": [end, end + spec.nbytes]}
        end += spec.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    start = 8 + math.ceil(len(text) / 8) * 8 if room is None else room
    text = text.ljust(start - 8)

    def fill(write: Write) -> None:
        write(0, memoryview(len(text).to_bytes(8, "little") + text))
        for key, part in tensors:
            assert (tuple(part.shape), part.dtype) == (entries[key].shape, entries[key].dtype), key
            write(start + begins[key], part.contiguous().view(-1).view(torch.uint8).numpy().data)

    return write_whole(path, start + end, fill)


def write_whole(path: Path, size: int, fill: Callable[[Write], object]) -> str:
    """Write a file of `size` bytes that gets its name, or replaces the existing file, when complete and synced.

    Args:
        path: The file.
        size: Its number of bytes.
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
    digest = digest_file(partial)
    DISK.rename(partial, path)
    return digest


def partial_of(path: Path) -> Path:
    """Return the path at which a file is written before it gets its name."""
    return path.with_name(f"{path.name}.partial")


def delete(path: Path) -> None:
    """Remove a file and sync its directory."""
    DISK.before("remove", path)
    path.unlink()
    DISK.sync_directory(path.parent)


def find_damage(path: Path, stored: StoredFile | ExpertRecord) -> str | None:
    """Return what is wrong with a file that was stored with this size and checksum; None if nothing is."""
    if not path.is_file():
        return "missing"
    if path.stat().st_size != stored.nbytes:
        return f"damaged: {path.stat().st_size} bytes instead of {stored.nbytes}"
    return None if digest_file(path) == stored.sha256 else "damaged: its checksum differs from the manifest"
