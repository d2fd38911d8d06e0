"""The header of a GGUF file: its settings and the offset of each tensor. Every count is checked against the file
size.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
#: Size in bytes of fixed-size values, by the type number of the format.
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9
#: Struct formats of numbers, by type number; settings of other types are skipped.
_NUMBERS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_ALIGNMENT = "general.alignment"
_LONGEST_TEXT = 1000
_MAX_AXES = 4  # GGML's limit
_MAX_NESTING = 4
#: Minimum size of a setting (a name, a type, a value) and of a tensor (a name, no axes, a type, an offset).
_LEAST_SETTING, _LEAST_TENSOR = 8 + 4 + 1, 8 + 4 + 4 + 8


@dataclass(frozen=True)
class GGUFEntry:
    """A tensor of the header: its shape, slowest axis first, its type, and its bytes in the file."""

    shape: tuple[int, ...]
    kind: int
    start: int
    stop: int

    @property
    def rows(self) -> tuple[int, int]:
        """Return the number of rows along the fastest axis, and the bytes of each."""
        count = math.prod(self.shape[:-1])
        return count, (self.stop - self.start) // max(1, count)


@dataclass(frozen=True)
class GGUFHeader:
    """The header of a GGUF file.

    Attributes:
        settings: Numbers and short texts by key; lists are left out.
        tensors: The tensors by name.
        span: The byte range of the settings, including lists, and their number.
        alignment: The alignment of tensor offsets.
        places: The byte offset of the value of each numeric setting.
    """

    settings: Mapping[str, float | str]
    tensors: Mapping[str, GGUFEntry]
    span: tuple[int, int, int]
    alignment: int
    places: Mapping[str, int]


def read_gguf_header(data: bytes | mmap.mmap, blocks: Mapping[int, tuple[int, int]]) -> GGUFHeader:
    """Read the header of a GGUF file.

    Args:
        data: The whole file, such as a memory map.
        blocks: The entries and bytes of a block, by tensor type.

    Raises:
        ValueError: If the file is not GGUF, is truncated, or is inconsistent.
    """
    header = _Header(memoryview(data))
    if header.bytes(4) != _MAGIC:
        raise ValueError("it does not start with GGUF")
    version = header.number("<I")
    if version not in _VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS
        raise ValueError("it is big-endian" if swapped else f"it has the unknown version {version}")
    tensors, settings = header.number("<Q"), header.number("<Q")
    header.check_count(settings, _LEAST_SETTING, "settings")
    known: dict[str, float | str] = {}
    places: dict[str, int] = {}
    start = header.at
    for _ in range(settings):
        key, kind = header.text(), header.number("<I")
        place = header.at
        header.skip_value(kind)
        if kind in _NUMBERS:
            (known[key],) = struct.unpack_from(_NUMBERS[kind], header.data, place)
            places[key] = place
        elif kind == _STRING and header.at - place - 8 <= _LONGEST_TEXT:
            known[key] = bytes(header.data[place + 8 : header.at]).decode("utf-8", "replace")
    span = (start, header.at, settings)
    alignment = known.get(_ALIGNMENT, 32)
    if not isinstance(alignment, int) or alignment & (alignment - 1) or alignment < 1:
        raise ValueError(f"it aligns tensors to {alignment} bytes, which is not a power of two")
    header.check_count(tensors, _LEAST_TENSOR, "tensors")
    found: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for _ in range(tensors):
        name = header.text()
        if name in found:
            raise ValueError(f"it has the tensor {name!r} twice")
        found[name] = header.tensor(name)
    origin = header.at + -header.at % alignment
    entries = {
        name: _entry(name, shape, kind, origin + offset, len(header.data), blocks)
        for name, (shape, kind, offset) in found.items()
    }
    return GGUFHeader(known, entries, span, alignment, places)


def _entry(
    name: str, shape: tuple[int, ...], kind: int, start: int, size: int, blocks: Mapping[int, tuple[int, int]]
) -> GGUFEntry:
    if kind not in blocks:
        raise ValueError(f"{name!r} is of the unknown kind {kind}")
    block, nbytes = blocks[kind]
    if (shape[-1] if shape else 1) % block:
        raise ValueError(f"the rows of {name!r} have {shape[-1:]} entries, which are not blocks of {block}")
    stop = start + math.prod(shape) // block * nbytes
    if stop > size or any(n > size * block for n in shape):
        raise ValueError(f"{name!r} ends at byte {stop}, the file at byte {size}")
    return GGUFEntry(shape, kind, start, stop)


class _Header:
    """A position in the file that never passes its end."""

    def __init__(self, data: memoryview) -> None:
        self.data = data
        self.at = 0

    def bytes(self, count: int) -> bytes:
        self.check_count(count, 1, "bytes")
        self.at += count
        return bytes(self.data[self.at - count : self.at])

    def number(self, form: str) -> int:
        size = struct.calcsize(form)
        self.check_count(size, 1, "bytes")
        self.at += size
        return int(struct.unpack_from(form, self.data, self.at - size)[0])

    def text(self) -> str:
        return self.bytes(self.number("<Q")).decode("utf-8")

    def check_count(self, count: int, least: int, what: str) -> None:
        """Refuse more items of a minimum size than the rest of the file can hold."""
        if count * least > len(self.data) - self.at:
            raise ValueError(f"it announces {count} {what} at byte {self.at}, but has only {len(self.data)} bytes")

    def skip_value(self, kind: int, nesting: int = 0) -> None:
        if kind in _SIZES:
            self.skip(1, _SIZES[kind])
        elif kind == _STRING:
            self.skip(self.number("<Q"), 1)
        elif kind == _ARRAY and nesting < _MAX_NESTING:
            inner, count = self.number("<I"), self.number("<Q")
            if inner in _SIZES:
                self.skip(count, _SIZES[inner])
                return
            self.check_count(count, 8, "values")
            for _ in range(count):
                self.skip_value(inner, nesting + 1)
        else:
            raise ValueError(f"it has a setting of the unknown kind {kind} at byte {self.at}")

    def skip(self, count: int, size: int) -> None:
        self.check_count(count, size, "values")
        self.at += count * size

    def tensor(self, name: str) -> tuple[tuple[int, ...], int, int]:
        """Return shape (slowest axis first), type and offset; GGUF lists the fastest axis first."""
        axes = self.number("<I")
        if axes > _MAX_AXES:
            raise ValueError(f"{name!r} has {axes} axes, more than the format's {_MAX_AXES}")
        shape = tuple(self.number("<Q") for _ in range(axes))
        return shape[::-1], self.number("<I"), self.number("<Q")
