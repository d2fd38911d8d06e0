"""Encode and decode one tensor's difference Δ as a blob, with any code.

A blob contains the code, the tensor's shape, ‖Δ‖², the squared error, and which rows changed: rows of zeros, such as
tokens that training did not see, take a bit each and are decoded to exact zeros. With a Gram matrix G = XᵀX of the
layer's inputs, squares are weighted, ‖E‖² = tr(E G Eᵀ) / (tr G / n): errors count by their effect on the layer's
outputs.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from merganser.errors import InputError
from merganser.kernels.spectra import Factors, randomized_svd, top_svd
from merganser.lazy import np, torch
from merganser.library.codes.blobs import BlobReader, BlobWriter
from merganser.methods.matrices import matrix_shape

if TYPE_CHECKING:
    from torch import Tensor

VERSION = 1
_MOST_AXES = 8
_RIDGE = 1e-4
#: Entries that are processed in float64 at once.
_BLOCK = 1 << 20


class Triple(NamedTuple):
    """A matrix as stored factors u · diag(s) · vᵀ: u and v are integers, s has their scales."""

    u: Tensor
    s: Tensor
    v: Tensor


class Delta:
    """The difference of one tensor, as a matrix of the changed rows, with values that several codes need.

    Args:
        delta: The difference, in the tensor's own shape.
        gram: The Gram matrix of the layer's inputs, for a weighted error.
        randomized: Decompose it approximately, up to a quarter of the full rank.
    """

    def __init__(self, delta: Tensor, gram: Tensor | None = None, randomized: bool = False) -> None:
        self.randomized = randomized
        self.shape = tuple(delta.shape)
        height, width = matrix_shape(self.shape)
        whole = delta.float().reshape(height, width)
        there = whole.ne(0).any(dim=1)
        self.rows = None if bool(there.all()) else there
        self.matrix = whole if self.rows is None else whole[there]
        self.gram: Tensor | None = None
        self._root: Tensor | None = None
        if gram is not None:
            if gram.shape != (width, width):
                raise InputError(f"its Gram matrix has shape {list(gram.shape)}, expected {[width, width]}")
            self.gram, self._root = _condition(gram)
        self.energy = self.error(None)

    def error(self, approximation: Tensor | None) -> float:
        """Return the squared error of an approximation of the matrix, weighted if there is a Gram matrix."""
        off = self.matrix if approximation is None else self.matrix - approximation
        step = max(1, _BLOCK // max(1, off.shape[1]))
        blocks = (off[start : start + step].double() for start in range(0, len(off), step))
        return math.fsum(float((rows * self.weigh(rows)).sum()) for rows in blocks)

    def weigh(self, rows: Tensor) -> Tensor:
        """Return rows · G."""
        return rows if self.gram is None else rows @ self.gram.to(rows.dtype)

    @cached_property
    def factors(self) -> Factors:
        """The singular value decomposition; with weights, of Δ L where G = L Lᵀ, with v in the original inputs."""
        n = min(self.matrix.shape)
        decompose = partial(randomized_svd, k=-(-n // 4)) if self.randomized else partial(top_svd, k=n)
        if self._root is None:
            return decompose(self.matrix)
        found = decompose(self.matrix.double() @ self._root)
        return found._replace(v=torch.linalg.solve_triangular(self._root.T, found.v, upper=True))


class Code(ABC):
    """A way to store a matrix of differences. A frozen record whose fields are its settings."""

    #: The name in options and reports, and the number in blobs.
    name: ClassVar[str]
    number: ClassVar[int]

    @abstractmethod
    def write(self, change: Delta, out: BlobWriter) -> None:
        """Append the matrix of a change."""

    @staticmethod
    @abstractmethod
    def read(source: BlobReader, height: int, width: int) -> Tensor | Triple:
        """Read a matrix of this shape as `write` wrote it."""


@dataclass(frozen=True)
class BlobHead:
    """The head of a blob: the number of its code, the tensor's shape, the squares of error and change, and whether
    rows of zeros were left out.
    """

    number: int
    shape: tuple[int, ...]
    error: float
    energy: float
    sparse: bool


@dataclass(frozen=True)
class Coded:
    """An encoded tensor with its squared error."""

    blob: bytes
    error: float

    @property
    def nbytes(self) -> int:
        return len(self.blob)


def encode(change: Delta, code: Code, energy: float | None = None) -> Coded:
    """Encode a change.

    Args:
        change: The difference of one tensor.
        code: How to store it.
        energy: The energy to store in the blob, if the change is the residual of a larger one.

    Returns:
        The blob and its squared error after decoding.

    Example:
        >>> coded = encode(Delta(torch.randn(8, 8)), Levels(step=0.5))
        >>> decode(coded.blob, (8, 8), "memory").shape
        torch.Size([8, 8])
    """
    inner = BlobWriter()
    height, width = change.matrix.shape
    if change.matrix.numel():
        code.write(change, inner)
        content = inner.content()
        error = change.error(dense(code.read(BlobReader(content, code.name), height, width)))
    else:
        content, error = b"", 0.0
    out = BlobWriter()
    out.numbers("BBBB", VERSION, code.number, change.rows is not None, len(change.shape))
    out.numbers(f"{len(change.shape)}I", *change.shape)
    out.numbers("dd", error, change.energy if energy is None else energy)
    if change.rows is not None:
        out.array(np.packbits(change.rows.numpy()))
    return Coded(out.content() + content, error)


def read_head(blob: bytes | memoryview, where: str) -> BlobHead:
    """Read only the head of a blob."""
    return _read_head(BlobReader(blob, where))


def decode(blob: bytes | memoryview, shape: Sequence[int], where: str) -> Tensor | Triple:
    """Decode a blob.

    Args:
        blob: A blob from `encode`.
        shape: The shape of the tensor in the base.
        where: The name of the blob in messages.

    Returns:
        The difference as a float32 tensor of this shape, or as factors of its matrix if stored as factors.

    Raises:
        CheckpointError: If the blob is damaged, or belongs to a tensor of another shape.
    """
    from merganser.library.codes.catalogue import CODES  # avoids a cyclic import

    source = BlobReader(blob, where)
    head = _read_head(source)
    if head.shape != tuple(shape):
        raise source.damaged(f"it has a tensor of {list(head.shape)}, the base has {list(shape)}")
    height, width = matrix_shape(head.shape)
    rows = None
    if head.sparse:
        bits = np.unpackbits(source.array("u1", -(-height // 8)), count=height).astype(bool)
        rows = torch.from_numpy(bits)
    count = height if rows is None else int(rows.sum())
    code = next((each for each in CODES.values() if each.number == head.number), None)
    if code is None:
        raise source.damaged(f"the code {head.number} is unknown; a later version may have written it")
    if count * width == 0:
        source.done()
        return torch.zeros(head.shape)
    found = code.read(source, count, width)
    source.done()
    if rows is not None:
        inner = found.u if isinstance(found, Triple) else found
        spread = inner.new_zeros(height, inner.shape[1])
        spread[rows] = inner
        found = found._replace(u=spread) if isinstance(found, Triple) else spread
    return found if isinstance(found, Triple) else found.view(head.shape)


def dense(found: Tensor | Triple) -> Tensor:
    """Return a decoded difference as one float32 tensor, a matrix if it was stored as factors."""
    if isinstance(found, Triple):
        return (found.u.float() * found.s) @ found.v.float().T
    return found


def _read_head(source: BlobReader) -> BlobHead:
    version, number, rows, axes = source.numbers("BBBB")
    if version != VERSION:
        raise source.damaged(f"the version {version} is unknown; a later version may have written it")
    if rows > 1 or axes > _MOST_AXES:
        raise source.damaged("its head is invalid")
    shape = source.numbers(f"{axes}I")
    error, energy = source.numbers("dd")
    if not (0 <= error < math.inf and 0 <= energy < math.inf):
        raise source.damaged("its error is not a number")
    return BlobHead(number, shape, error, energy, bool(rows))


def _condition(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Return a Gram matrix G with mean diagonal 1 and a small multiple of the identity added, so that it is
    invertible, and L with G = L Lᵀ.
    """
    wide = gram.double()
    mean = wide.diagonal().mean().clamp(min=1e-300)
    scaled = (wide + wide.T) / (2 * mean * (1 + _RIDGE)) + torch.eye(len(wide), dtype=wide.dtype) * _RIDGE
    root, failed = torch.linalg.cholesky_ex(scaled)
    if int(failed) or not bool(root.isfinite().all()):
        raise InputError("its Gram matrix is not XᵀX of any inputs X: it has negative eigenvalues, NaN or infinity")
    return scaled, root
