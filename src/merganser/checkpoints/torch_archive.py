"""Archives written by `torch.save`, memory-mapped without running any pickled code."""

from __future__ import annotations

import io
import math
import mmap
import re
import warnings
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from merganser.checkpoints.dtypes import Element
from merganser.checkpoints.inert_pickle import InertRecord, load_inert, read_sizes
from merganser.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

_LOCAL_HEADER, _NAME_AT = 30, 26
_STORAGES = {
    "Double": "float64", "Float": "float32", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64", "Int": "int32",
    "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool", "ComplexFloat": "complex64",
}  # fmt: skip
_TENSOR = re.compile(r"torch(\._utils\._rebuild_(tensor_v2|parameter)|\.\w+Storage|\._tensor\._rebuild_from_type_v2)$")


@dataclass(frozen=True)
class _Storage:
    dtype: str
    start: int
    count: int


def read_torch_archive(
    path: Path, accepts: Callable[[str], bool], span: tuple[int, int] | None = None
) -> tuple[Any, frozenset[str]]:
    """Return the content of a `torch.save` archive, with tensors mapped from the file.

    Args:
        path: The file.
        accepts: Whether a type or function besides those of tensors is allowed; it becomes an inert record.
        span: The byte range of the archive in the file; by default all of it.

    Returns:
        The content, and the paths of all types and functions in the pickle.

    Raises:
        ValueError: If it is not such an archive, is damaged, or names something that is not accepted.
        OSError: If it cannot be read.
    """
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    start, stop = span or (0, len(mapped))
    if not 0 <= start <= stop <= len(mapped):
        raise ValueError(f"bytes {start} to {stop} are not in the file, which has {len(mapped)}")
    view = memoryview(mapped)[start:stop]
    try:
        with zipfile.ZipFile(_Reading(view)) as archive:
            listed = archive.infolist()
            if any(each.compress_type != zipfile.ZIP_STORED for each in listed):
                raise ValueError("its records are compressed, which torch.save never does")
            places = {each.filename.partition("/")[2]: _place(view, each) for each in listed}
            first, last = places["data.pkl"]
    except (zipfile.BadZipFile, KeyError, NotImplementedError, RuntimeError) as error:
        raise ValueError(f"not an archive of torch.save: {error}") from None

    def storage(pid: Any) -> _Storage:
        kind, key, count = (pid[1], pid[2], pid[4]) if isinstance(pid, tuple) and len(pid) == 5 else (None, "", 0)
        name = kind.path.removeprefix("torch.").removesuffix("Storage") if isinstance(kind, type) else ""  # type: ignore[attr-defined]
        begin, end = places.get(f"data/{key}", (0, 0))
        if (
            name not in _STORAGES
            or type(count) is not int
            or end - begin < count * Element.of(_STORAGES[name]).itemsize
        ):
            raise ValueError(f"it has a storage {str(key)[:60]!r} that is missing from the file")
        return _Storage(_STORAGES[name], start + begin, count)

    content, seen = load_inert(
        bytes(view[first:last]), lambda path: _TENSOR.match(path) is not None or accepts(path), storage
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        whole = torch.frombuffer(mapped, dtype=torch.uint8)
    return _restore(content, whole, 0), seen


class _Reading(io.BytesIO):
    """A part of a file for `zipfile`, which reads its end and the offsets listed there."""

    def __init__(self, view: memoryview) -> None:
        super().__init__()
        self._view = view
        self._at = 0

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = max(0, offset + {0: 0, 1: self._at, 2: len(self._view)}[whence])
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        stop = len(self._view) if size is None or size < 0 else self._at + size
        found = bytes(self._view[self._at : stop])
        self._at += len(found)
        return found


def _place(view: memoryview, record: zipfile.ZipInfo) -> tuple[int, int]:
    """Return the byte range of a record in the archive."""
    at = record.header_offset
    lengths = bytes(view[at + _NAME_AT : at + _LOCAL_HEADER])
    start = at + _LOCAL_HEADER + int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
    if len(lengths) < 4 or start + record.file_size > len(view):
        raise ValueError(f"its record {record.filename[:60]!r} ends beyond the file")
    return start, start + record.file_size


def _restore(content: Any, whole: Tensor, depth: int) -> Any:
    """Return content with records of tensors replaced by tensors, inside mappings."""
    if depth > 100:
        raise ValueError("it is nested more than 100 deep")
    if isinstance(content, Mapping):
        return {key: _restore(value, whole, depth + 1) for key, value in content.items()}
    if isinstance(content, InertRecord) and content.path.endswith("_rebuild_parameter") and content.args:
        return _restore(content.args[0], whole, depth + 1)
    if isinstance(content, InertRecord) and content.path.endswith("_rebuild_tensor_v2"):
        return _tensor(content.args, whole)
    return content


def _tensor(args: tuple[Any, ...], whole: Tensor) -> Tensor:
    storage, offset = args[:2] if len(args) > 3 else (None, 0)
    if not isinstance(storage, _Storage) or type(offset) is not int or offset < 0:
        raise ValueError("it has a tensor without a storage")
    shape, strides = read_sizes(args[2]), read_sizes(args[3])
    reach = offset + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) + 1 if all(shape) else 0
    if reach > storage.count or math.prod(shape) > storage.count:
        raise ValueError(f"it has a tensor of shape {list(shape)} in a storage of {storage.count} entries")
    element = Element.of(storage.dtype)
    raw = whole[storage.start : storage.start + storage.count * element.itemsize]
    if storage.start % element.itemsize:
        raw = raw.clone()  # other writers may not align storages
    entries = raw.view(element.dtype)
    return entries.as_strided(shape, strides, entries.storage_offset() + offset)
