"""Entries of tensors as bytes in memory, as files of weights store them.

Copying, compiled rules and writing need no more than an address, a dtype and a number of entries; torch is imported
where its tensors are asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from merganser.checkpoints.dtypes import Element
from merganser.lazy import np, torch

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

Bytes: TypeAlias = "npt.NDArray[np.uint8]"


class StoredEntries:
    """Consecutive entries of a tensor; do not write into those that were read.

    Args:
        bytes: Their bytes, in a row.
        element: Their dtype.

    Example:
        >>> entries = StoredEntries.empty(6, Element.of("bfloat16"))
        >>> len(entries), len(entries[2:4].bytes)
        (6, 4)
    """

    def __init__(self, bytes: Bytes, element: Element) -> None:
        self._bytes = bytes
        self._element = element

    @classmethod
    def empty(cls, count: int, element: Element) -> StoredEntries:
        """Return room for so many entries."""
        return StoredEntries(np.empty(count * element.itemsize, np.uint8), element)

    @classmethod
    def of(cls, tensor: Tensor) -> StoredEntries:
        """Return the entries of a contiguous tensor of the CPU, in its own memory."""
        return _TensorEntries(tensor)

    @property
    def bytes(self) -> Bytes:
        return self._bytes

    @property
    def element(self) -> Element:
        return self._element

    @property
    def address(self) -> int:
        """Where they begin in memory."""
        return int(self._bytes.__array_interface__["data"][0])

    def __len__(self) -> int:
        return len(self._bytes) // self._element.itemsize

    def __getitem__(self, entries: slice) -> StoredEntries:
        start, stop, _ = entries.indices(len(self))
        size = self._element.itemsize
        return StoredEntries(self._bytes[start * size : stop * size], self._element)

    def tensor(self) -> Tensor:
        """Return them as a flat tensor in the same memory."""
        if not len(self):
            return torch.empty(0, dtype=self._element.dtype, device="cpu")
        return torch.from_numpy(self._bytes).view(self._element.dtype)

    def numbers(self) -> npt.NDArray[Any]:
        """Return the values of real numbers as an array of numpy; bfloat16, which numpy does not have, as float32."""
        if self.element.name == "bfloat16":
            return (self.bytes.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        return self.bytes.view(self.element.name)

    def overlap(self, other: StoredEntries) -> bool:
        """Return whether some bytes belong to both."""
        first, second = sorted((self, other), key=lambda entries: entries.address)
        return second.address < first.address + len(first) * first.element.itemsize


class _TensorEntries(StoredEntries):
    """The entries of a tensor of torch."""

    def __init__(self, tensor: Tensor) -> None:
        self._flat = tensor.view(-1)

    @property
    def bytes(self) -> Bytes:
        return self._flat.view(torch.uint8).numpy()

    @property
    def element(self) -> Element:
        return Element.of(self._flat.dtype)

    @property
    def address(self) -> int:
        return self._flat.data_ptr()

    def __len__(self) -> int:
        return self._flat.numel()

    def __getitem__(self, entries: slice) -> StoredEntries:
        return _TensorEntries(self._flat[entries])

    def tensor(self) -> Tensor:
        return self._flat


class WritableBytes:
    """Lets numpy see read-only memory as writable: torch warns of tensors in other memory.

    Args:
        bytes: The read-only bytes; `numpy.asarray` of this object keeps them.
    """

    def __init__(self, bytes: Bytes) -> None:
        self._bytes = bytes
        address, _ = bytes.__array_interface__["data"]
        self.__array_interface__ = {**bytes.__array_interface__, "data": (address, False)}
