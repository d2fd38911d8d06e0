"""The protocol of all sources of weights."""

from __future__ import annotations

import hashlib
import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from merganser.checkpoints.cards import Lineage
from merganser.checkpoints.digests import digest_tensor
from merganser.checkpoints.dtypes import Element
from merganser.checkpoints.stored_entries import StoredEntries
from merganser.errors import MissingTensorError, did_you_mean
from merganser.lazy import torch
from merganser.notebooks import Shown

if TYPE_CHECKING:
    from torch import Tensor

Rows = tuple[int, int]
#: Entries of a block that stays in cache.
_BLOCK = 1 << 17


@dataclass(frozen=True, init=False)
class TensorSpec:
    """The shape and dtype of a tensor, known before it is read.

    Args:
        shape: The shape.
        dtype: The dtype, as torch's or by name. `element` describes it without loading torch.

    Example:
        >>> spec = mg.checkpoints.TensorSpec((16, 8), "bfloat16")
        >>> spec.numel, spec.nbytes
        (128, 256)
    """

    shape: tuple[int, ...]
    element: Element

    def __init__(self, shape: tuple[int, ...], dtype: Element | torch.dtype | str) -> None:
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "element", Element.of(dtype))

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of torch."""
        return self.element.dtype

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.element.itemsize

    def __str__(self) -> str:
        return f"{self.element}{list(self.shape)}"


class Checkpoint(Shown, Mapping[str, "Tensor"]):
    """A lazy mapping from names to tensors: opening one reads headers only.

    `checkpoint["name"]`, `in`, `len`, iteration and `module.load_state_dict(checkpoint)` work as on a state dict; tied
    names are keys like any other. Whatever changes weights without merging them (an adapter over its base, a
    permutation, a slice) is a checkpoint too, made from another one.

    Two checkpoints are equal only if they are the same object: comparing weights would read them all.

    Example:
        >>> checkpoint = mg.open("math")
        >>> rows = checkpoint.read("0.weight", (0, 4))
        >>> base.load_state_dict(checkpoint)
        <All keys matched successfully>
    """

    #: The name of this checkpoint in messages.
    label: str
    #: The directory of its sidecars (config, tokenizer), if it is on disk.
    directory: Path | None = None

    @abstractmethod
    def names(self) -> Sequence[str]:
        """Return the names of all stored tensors in the order of the source; `aliases` has the tied names."""

    @abstractmethod
    def spec(self, name: str) -> TensorSpec:
        """Return shape and dtype from the header alone; accepts tied names."""

    @abstractmethod
    def read(self, name: str, rows: Rows | None = None) -> Tensor:
        """Return the tensor, or its rows `[start, stop)` along the first axis; do not write into it.

        A view that computes may return a wider dtype than `spec` names, so that rounding happens once, at the end.
        """

    def read_stored(self, name: str, rows: Rows | None = None) -> StoredEntries | None:
        """Return the entries of `read` in the memory where they are stored, without torch; None if it computes them."""
        return None

    def aliases(self) -> Mapping[str, str]:
        """Return tied names: alias -> the stored name with the same weights."""
        return {}

    def resolve_alias(self, name: str) -> str:
        """Return the stored name of a tensor that may be given by a tied one."""
        return self.aliases().get(name, name)

    @property
    def nbytes(self) -> int:
        """The size of all stored tensors in bytes; tied ones count once."""
        return sum(self.spec(name).nbytes for name in self.names())

    def fingerprint(self) -> str:
        """Return a text that changes when the weights may have changed; reads only headers if the source allows it."""
        digest = hashlib.sha256()
        for name in self.names():
            digest.update(f"{name} {self.spec(name)}\n".encode())
        return digest.hexdigest()

    def files(self) -> Sequence[Path]:
        """Return the files that weights are read from; none for weights in memory."""
        return ()

    def digest(self, name: str, algorithm: str) -> str:
        """Return the digest of a tensor's bytes as they are stored, in hexadecimal (`checkpoints.digests`)."""
        return digest_tensor(self.read(name), algorithm)

    def lineage(self) -> Lineage:
        """Return what its weights were made of, for the model card of a copy; empty for weights as they are."""
        return Lineage()

    def notes(self) -> list[str]:
        """Return what the user of a merge should know about how these weights are read."""
        return []

    def overhead(self, name: str, entries: int) -> int:
        """Return the bytes that reading so many entries of a tensor takes besides those entries."""
        return 0

    def peek(self, name: str, first: int, count: int) -> bytes | None:
        """Return a few entries as they are stored, without fetching the others; None if they are not stored as such."""
        return None

    def prefetch(self, name: str, rows: Rows | None = None) -> None:
        """Announce that these rows will be read soon; rows that do not exist are ignored."""

    def __getitem__(self, name: str) -> Tensor:
        if name not in self:
            raise self.missing(name)
        return self.read(name)

    def __iter__(self) -> Iterator[str]:
        yield from self.names()
        yield from self.aliases()

    def __len__(self) -> int:
        return len(self.names()) + len(self.aliases())

    def __contains__(self, name: object) -> bool:
        return name in self._name_set() or name in self.aliases()

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        specs = [self.spec(name) for name in self.names()]
        dtypes = dict.fromkeys(spec.element.name for spec in specs)
        parts = [
            f"{len(specs):,} tensors",
            f"{sum(spec.numel for spec in specs):,} parameters",
            *(["/".join(dtypes)] if dtypes else []),
            *([f"{len(self.files())} files"] if len(self.files()) > 1 else []),
        ]
        return f"<{type(self).__name__} {self.label}: {', '.join(parts)}>"

    def _name_set(self) -> frozenset[str]:
        cached: frozenset[str] | None = self.__dict__.get("_names_cached")
        if cached is None:
            cached = self.__dict__["_names_cached"] = frozenset(self.names())
        return cached

    def missing(self, name: object) -> MissingTensorError:
        """Return the error to raise for a name that is not in this checkpoint."""
        return MissingTensorError(f"{self.label} has no tensor {name!r}{did_you_mean(str(name), self.names())}")

    def state_dict(self) -> dict[str, Tensor]:
        """Read everything into memory. Tied names share one tensor, which is read once."""
        tensors = {name: self.read(name) for name in self.names()}
        return tensors | {alias: tensors[name] for alias, name in self.aliases().items()}


class View(Checkpoint):
    """A checkpoint made from another one; a subclass overrides what it changes.

    Args:
        source: The checkpoint that is viewed.
        label: What messages call the view. It may start with the label of its source, and the rest must tell views of
            one class apart, or `fingerprint` must.

    Example:
        >>> view = mg.checkpoints.View(mg.open("math"), "a copy of math")
        >>> len(view)
        6
    """

    #: Whether this view applies an adapter to its source.
    adapts = False
    #: Names that the source ties and this view gives separate weights -> the names they were tied to.
    untied: Mapping[str, str] = MappingProxyType({})

    def __init__(self, source: Checkpoint, label: str) -> None:
        self.source = source
        self.label = label
        self.directory = source.directory

    def names(self) -> Sequence[str]:
        return self.source.names()

    def spec(self, name: str) -> TensorSpec:
        return self.source.spec(name)

    def read(self, name: str, rows: Rows | None = None) -> Tensor:
        return self.source.read(name, rows)

    def aliases(self) -> Mapping[str, str]:
        return self.source.aliases()

    def fingerprint(self) -> str:
        own = self.label.removeprefix(self.source.label)  # which has the path that the source was opened by
        return hash_text(f"{type(self).__name__}{own} {self.source.fingerprint()}")

    def files(self) -> Sequence[Path]:
        return self.source.files()

    def notes(self) -> list[str]:
        return self.source.notes()

    def overhead(self, name: str, entries: int) -> int:
        return self.source.overhead(name, entries) if name in self.source else 0

    def prefetch(self, name: str, rows: Rows | None = None) -> None:
        if name in self.source:
            self.source.prefetch(name, rows)


def views(checkpoint: Checkpoint) -> Iterator[View]:
    """Yield a view and the views it is made from, the outermost first; nothing for a checkpoint that is none."""
    while isinstance(checkpoint, View):
        yield checkpoint
        checkpoint = checkpoint.source


def hash_text(text: str) -> str:
    """Return the SHA-256 of a text in hexadecimal, for fingerprints."""
    return hashlib.sha256(text.encode()).hexdigest()


def is_integer(dtype: torch.dtype | Element) -> bool:
    """Return whether a dtype is integer or boolean; such tensors (counters, position ids) are never averaged."""
    return not (dtype.is_floating_point or dtype.is_complex)


def read_entries(checkpoint: Checkpoint, name: str, rows: Rows | None = None) -> StoredEntries | None:
    """Return the entries of `read`, with torch if it is needed; None if they are not in a row in the CPU's memory."""
    stored = checkpoint.read_stored(name, rows)
    if stored is not None:
        return stored
    tensor = checkpoint.read(name, rows)
    return StoredEntries.of(tensor) if tensor.is_contiguous() and tensor.device.type == "cpu" else None


def row_blocks(spec: TensorSpec, rows: Rows | None = None, entries: int = _BLOCK) -> Iterator[Rows | None]:
    """Yield rows in blocks of about so many entries; by default, blocks stay in cache. A number is one block, None."""
    if not spec.shape:
        yield None
        return
    first, last = rows or (0, spec.shape[0])
    step = max(1, entries // max(1, math.prod(spec.shape[1:])))
    for start in range(first, last, step):
        yield start, min(start + step, last)


def select_rows(tensor: Tensor, rows: Rows | None) -> Tensor:
    return tensor if rows is None or tensor.dim() == 0 else tensor[rows[0] : rows[1]]
