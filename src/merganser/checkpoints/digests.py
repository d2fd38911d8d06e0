"""Digests of tensors and files, for lock files."""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from merganser.errors import one_of
from merganser.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

#: SHA-256 proves that bytes are the same; xxh3 detects every accident at a tenth of the cost, but can be forged.
DIGESTS: dict[str, Callable[..., Any]] = {"sha256": hashlib.sha256, "xxh3_128": xxhash.xxh3_128}
_CHUNK = 1 << 20
_PAGE = 4096


def check_digest(name: object) -> None:
    """Refuse an unknown digest algorithm."""
    one_of("digest", name, DIGESTS)


def digest_bytes(data: Any, algorithm: str) -> str:
    """Return the digest of a buffer, in hexadecimal."""
    return str(DIGESTS[algorithm](data).hexdigest())


def digest_tensor(tensor: Tensor, algorithm: str) -> str:
    """Return the digest of the entries of a tensor in the order of safetensors."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return digest_bytes(flat.view(torch.uint8).numpy().data if flat.numel() else b"", algorithm)


def digest_sampled(data: mmap.mmap, entries: Iterable[str]) -> str:
    """Return the SHA-256 of a file's size, of texts on its tensors, and of 64 pages spread over it: cheap, and equal
    for copies.
    """
    size = len(data)
    digest = hashlib.sha256(f"{size}\n".encode())
    for entry in entries:
        digest.update(f"{entry}\n".encode())
    for start in (*range(0, size, max(_PAGE, size // 64)), max(0, size - _PAGE)):
        digest.update(data[start : start + _PAGE])
    return digest.hexdigest()


def digest_file(path: Path, algorithm: str = "sha256") -> str:
    """Return the digest of a file, in hexadecimal."""
    digest, buffer = DIGESTS[algorithm](), bytearray(_CHUNK)
    with path.open("rb") as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while count := file.readinto(buffer):
            digest.update(memoryview(buffer)[:count])
    return str(digest.hexdigest())
