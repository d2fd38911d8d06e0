"""A safetensors file: an 8-byte length, a JSON header, then the weights. Everything is checked before it is used."""

from __future__ import annotations

import errno
import functools
import math
import mmap
import os
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from merganser.checkpoints.base import Checkpoint, Rows, TensorSpec
from merganser.checkpoints.digests import digest_bytes, digest_sampled
from merganser.checkpoints.dtypes import Element
from merganser.checkpoints.lfs_pointers import refuse_lfs_pointer
from merganser.checkpoints.reads import note_read
from merganser.checkpoints.stored_entries import Bytes, StoredEntries, WritableBytes
from merganser.errors import CheckpointError
from merganser.lazy import np
from merganser.strict_json import parse_json

if TYPE_CHECKING:
    from torch import Tensor

#: The dtype codes of the format -> names of dtypes.
DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "C64": "complex64",
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
MAX_HEADER = 100_000_000
METADATA = "__metadata__"
#: Metadata whose value is never the name of a tensor, even where a tensor is called `pt`.
_ABOUT_THE_FILE = ("format", "framework")


@dataclass(frozen=True)
class Extent:
    """A tensor of the header with its position from the start of the file."""

    spec: TensorSpec
    start: int
    stop: int


def read_header(file: BinaryIO, path: Path) -> tuple[dict[str, Extent], dict[str, str]]:
    """Return the entries and metadata of an open file, after checking all bounds against its size."""
    size = os.fstat(file.fileno()).st_size
    prefix = file.read(8)
    if len(prefix) < 8:
        raise CheckpointError(f"{path}: truncated: {size} bytes are too few for a safetensors file")
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER:
        refuse_lfs_pointer(path)
        raise CheckpointError(
            f"{path}: the header claims {length} bytes, more than the format's limit of {MAX_HEADER}; "
            "this is not a safetensors file"
        )
    if 8 + length > size:
        raise CheckpointError(f"{path}: truncated: the header needs {8 + length} bytes, the file has {size}")
    return parse_header(file.read(length), size, str(path))


def parse_header(raw: bytes, size: int, where: str) -> tuple[dict[str, Extent], dict[str, str]]:
    """Return the entries and metadata of a header; accepts what the reference library accepts."""
    try:
        header = parse_json(raw, finite=True)
    except ValueError as error:
        raise CheckpointError(f"{where}: the header is not valid JSON ({error}); the file is damaged") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{where}: the header is not a JSON object; the file is damaged")
    metadata = header.pop(METADATA, None)
    metadata = {} if metadata is None else metadata
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{where}: the header's metadata is not a JSON object of texts")
    origin = 8 + len(raw)
    entries = {name: _entry(name, value, origin, size, where) for name, value in header.items()}
    _check_cover(entries, origin, size, where)
    return entries, metadata


def _entry(name: str, value: Any, origin: int, size: int, where: str) -> Extent:
    try:
        code, shape, (begin, end) = value["dtype"], value["shape"], value["data_offsets"]
        numbers = (*shape, begin, end)
        sane = isinstance(shape, list) and {*map(type, numbers)} == {int} and min(numbers) >= 0
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(f"{where}: the header entry of {name!r} is malformed") from None
    if not sane:
        raise CheckpointError(f"{where}: {name!r} has a negative or fractional shape or offset")
    if not isinstance(code, str) or code not in DTYPES:
        raise CheckpointError(f"{where}: {name!r} has the dtype {code!r}, which cannot be read")
    spec = TensorSpec(tuple(shape), DTYPES[code])
    if math.prod(max(1, n) for n in shape) * spec.element.itemsize >= 1 << 63:  # strides overflow even without elements
        raise CheckpointError(f"{where}: {name!r} has the shape {shape}, which is too large for any tensor")
    if end - begin != spec.nbytes:
        raise CheckpointError(f"{where}: {name!r} of {spec} needs {spec.nbytes} bytes, its offsets span {end - begin}")
    if origin + end > size:
        raise CheckpointError(
            f"{where}: truncated or damaged: {name!r} ends at byte {origin + end}, the file at byte {size}"
        )
    return Extent(spec, origin + begin, origin + end)


def _check_cover(entries: Mapping[str, Extent], origin: int, size: int, where: str) -> None:
    """Check that every byte after the header belongs to exactly one tensor."""
    reached, owner = origin, "the header"
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start < reached:
            raise CheckpointError(f"{where}: the data of {owner} and {name!r} overlap")
        if entry.start > reached:
            raise CheckpointError(
                f"{where}: {entry.start - reached} bytes between {owner} and {name!r} do not belong to a tensor"
            )
        reached, owner = entry.stop, repr(name)
    if reached < size:
        rest = f"{size - reached} bytes after {owner} do not belong to a tensor"
        raise CheckpointError(f"{where}: {rest}; the file is damaged")


class StoredTensors(Checkpoint):
    """The tensors of a header, in a local or remote file."""

    def __init__(self, entries: Mapping[str, Extent], metadata: Mapping[str, str]) -> None:
        self.entries, self.metadata = entries, metadata
        self._names = list(entries)
        self._aliases = {
            k: v for k, v in metadata.items() if v in entries and k not in entries and k not in _ABOUT_THE_FILE
        }

    def names(self) -> Sequence[str]:
        return self._names

    def spec(self, name: str) -> TensorSpec:
        return self._find(name).spec

    def read(self, name: str, rows: Rows | None = None) -> Tensor:
        shape = self.spec(name).shape
        if rows is not None and shape:
            shape = len(range(shape[0])[slice(*rows)]), *shape[1:]
        return self.read_stored(name, rows).tensor().view(shape)

    def read_stored(self, name: str, rows: Rows | None = None) -> StoredEntries:
        entry = self._find(name)
        note_read(self, self._aliases.get(name, name))
        shape, element = entry.spec.shape, entry.spec.element
        if entry.start == entry.stop:
            return StoredEntries.empty(0, element)
        entries = StoredEntries(self._read(entry), element)
        if rows is not None and shape:
            wanted, row = range(shape[0])[slice(*rows)], math.prod(shape[1:])
            entries = entries[wanted.start * row : wanted.stop * row]
        # The format promises no alignment.
        return entries if entries.address % element.itemsize == 0 else StoredEntries(entries.bytes.copy(), element)

    @abstractmethod
    def _read(self, entry: Extent) -> Bytes:
        """Return the bytes of a tensor that is not empty."""

    def aliases(self) -> Mapping[str, str]:
        """Return the tied names that `safetensors.torch.save_model` left out and noted in the metadata."""
        return self._aliases

    def _find(self, name: str) -> Extent:
        entry = self.entries.get(name) or self.entries.get(self._aliases.get(name, ""))
        if entry is None:
            raise self.missing(name)
        return entry


class SafetensorsFile(StoredTensors):
    """A memory-mapped file: reading makes no copy, and the system can reclaim the memory."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.label = str(path)
        self.directory = self.path.parent
        try:
            with self.path.open("rb") as file:
                super().__init__(*read_header(file, self.path))
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            if error.errno != errno.EMFILE:
                raise
            raise CheckpointError(f"{path}: too many open files; raise the limit (ulimit -n)") from None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path,), {"label": self.label}

    @functools.cached_property
    def _bytes(self) -> Bytes:
        return np.asarray(WritableBytes(np.frombuffer(self._map, np.uint8)))

    def _read(self, entry: Extent) -> Bytes:
        self._check_size(entry)
        return self._bytes[entry.start : entry.stop]

    def digest(self, name: str, algorithm: str) -> str:
        return digest_bytes(self.read_bytes(name), algorithm)

    def address(self, name: str) -> int:
        """Return where in memory the bytes of a tensor are mapped."""
        return StoredEntries(self._bytes, Element.of("uint8")).address + self._find(name).start

    def read_bytes(self, name: str) -> memoryview:
        """Return the bytes of a tensor as they are stored."""
        entry = self._find(name)
        self._check_size(entry)
        return memoryview(self._map)[entry.start : entry.stop]

    def peek(self, name: str, first: int, count: int) -> bytes:
        size = self.spec(name).element.itemsize
        return bytes(self.read_bytes(name)[first * size : (first + count) * size])

    def prefetch(self, name: str, rows: Rows | None = None) -> None:
        entry = self._find(name)
        start, stop = entry.start, entry.stop
        if rows is not None and entry.spec.shape:
            row = (stop - start) // max(1, entry.spec.shape[0])
            start, stop = start + rows[0] * row, min(stop, start + rows[1] * row)
        start -= start % mmap.PAGESIZE
        if stop > start and hasattr(mmap, "MADV_WILLNEED"):
            self._map.madvise(mmap.MADV_WILLNEED, start, stop - start)

    def fingerprint(self) -> str:
        return digest_sampled(self._map, (f"{name} {each.spec} {each.start}" for name, each in self.entries.items()))

    def files(self) -> Sequence[Path]:
        return (self.path,)

    def _check_size(self, entry: Extent) -> None:
        if self._map.size() < entry.stop:  # reading beyond the end would kill the process
            raise CheckpointError(f"{self.path}: was truncated while it was read; is another program writing it?")
