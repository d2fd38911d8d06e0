"""The stored tensors of one expert: as factors, whole, or in one of the codes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from merganser import strict_json
from merganser.checkpoints.base import Rows, TensorSpec, select_rows
from merganser.checkpoints.recent import Recent
from merganser.checkpoints.safetensors_file import SafetensorsFile
from merganser.errors import CheckpointError
from merganser.kernels.spectra import Factors
from merganser.lazy import torch
from merganser.library.codes.coding import BlobHead, Triple, decode, dense, read_head
from merganser.library.codes.mixed_factors import MixedFactors
from merganser.library.storage import normalize_factors, orthonormalize_factors, product
from merganser.library.unfolding import as_matrix
from merganser.methods.matrices import matrix_shape

if TYPE_CHECKING:
    from torch import Tensor

#: How a changed tensor is available: as factors of its change, whole, or as its decoded change.
StoredKind = Literal["factors", "full", "coded"]
_PARTS: Mapping[tuple[str, ...], StoredKind | None] = {
    ("s", "u", "v"): "factors",
    ("full",): "full",
    ("code",): None,
    ("residual",): None,
}
_PIECE = 1 << 18
_RECENT = 3


class ExpertFile:
    """The stored tensors of one expert, memory-mapped.

    Args:
        path: The file.
        shared: The file of the part that all experts share, for tensors stored as residuals.

    Attributes:
        kinds: How each stored tensor is available.
        heads: The heads of the codes, for coded tensors.
        dropped: Energies of changed tensors that were not stored.
    """

    def __init__(self, path: Path, shared: ExpertFile | None = None) -> None:
        self.path = path
        self.weights = SafetensorsFile(path)
        self.shared = shared
        self.kinds: dict[str, StoredKind] = {}
        self.heads: dict[str, BlobHead] = {}
        self._keys: dict[str, list[str]] = {}
        self._ranks: dict[str, int] = {}
        self._recent: Recent[Tensor | Triple] = Recent(_RECENT)
        for key in self.weights.names():
            self._keys.setdefault(key.rpartition("::")[0], []).append(key)
        for name, keys in self._keys.items():
            parts = tuple(sorted(key.rpartition("::")[2] for key in keys))
            if parts not in _PARTS:
                raise CheckpointError(
                    f"{path}: {keys[0]!r} is not part of an expert; merganser did not write this file"
                )
            self.kinds[name] = _PARTS[parts] or self._open_code(name, keys[0])
        self.dropped = _read_dropped(self.weights.metadata.get("dropped", "{}"), path)

    def _open_code(self, name: str, key: str) -> StoredKind:
        spec, where = self.weights.spec(key), f"{self.path}: {key!r}"
        if len(spec.shape) != 1 or spec.element.name != "uint8":
            raise CheckpointError(f"{where}: damaged: it is not a code")
        head = self.heads[name] = read_head(self._read_blob(key), where)
        factors = head.number == MixedFactors.number
        if factors and len(head.shape) < 2:
            raise CheckpointError(f"{where}: damaged: a tensor of {list(head.shape)} has no factors")
        if not self.is_residual(name):
            return "factors" if factors else "coded"
        if self.shared is None or name not in self.shared.heads or self.shared.heads[name].shape != head.shape:
            raise CheckpointError(f"{where}: needs a shared part that the library does not have")
        return "coded"

    def spec(self, name: str) -> TensorSpec:
        """Return the shape of a changed tensor, or of its matrix if it has factors; the dtype is the expert's own if
        the tensor is kept whole.
        """
        if self.kinds[name] == "full":
            return self.weights.spec(f"{name}::full")
        if name in self.heads:
            shape = self.heads[name].shape
            return TensorSpec(matrix_shape(shape) if self.kinds[name] == "factors" else shape, torch.float32)
        d, m = (self.weights.spec(f"{name}::{part}").shape[0] for part in "uv")
        return TensorSpec((d, m), torch.float32)

    def fits(self, name: str, shape: tuple[int, ...]) -> bool:
        """Return whether a change fits a tensor of this shape; a tensor kept whole always does."""
        if name in self.heads:
            return self.heads[name].shape == shape
        return self.kinds[name] == "full" or (len(shape) > 1 and self.spec(name).shape == matrix_shape(shape))

    def nbytes(self, name: str) -> int:
        """Return the bytes that a tensor takes, without the file's header."""
        return sum(self.weights.spec(key).nbytes for key in self._keys[name])

    def is_residual(self, name: str) -> bool:
        """Return whether a tensor is stored as the residual of the part that all experts share."""
        return self._keys[name][0].endswith("::residual")

    def rank(self, name: str) -> int:
        if name not in self._ranks:
            found = self.triple(name)[1].shape if name in self.heads else self.weights.spec(f"{name}::s").shape
            self._ranks[name] = found[0]
        return self._ranks[name]

    def full(self, name: str, rows: Rows | None = None) -> Tensor:
        return self.weights.read(f"{name}::full", rows)

    def triple(self, name: str) -> tuple[Tensor, Tensor, Tensor]:
        """Return u, s and v as stored."""
        if name in self.heads:
            found = self._get_decoded(name)
            assert isinstance(found, Triple), "tensors of kind factors are stored as such"
            return found
        u, s, v = (self.weights.read(f"{name}::{part}") for part in "usv")
        return u, s, v

    def factors(self, name: str) -> Factors:
        return (orthonormalize_factors if name in self.heads else normalize_factors)(*self.triple(name))

    def change(self, name: str) -> Tensor:
        """Return the stored change of a tensor that is not kept whole, in float32, as a matrix if it has factors."""
        if self.kinds[name] == "factors":
            return product(*self.triple(name))
        found = self._get_decoded(name)
        assert not isinstance(found, Triple)
        return found

    def added_to(self, base: Tensor, name: str, rows: Rows | None = None) -> Tensor:
        """Return base + change in the base's shape, or these rows of it, in at least float32."""
        wide = torch.promote_types(base.dtype, torch.float32)
        if self.kinds[name] == "coded":
            return base.to(wide) + select_rows(self.change(name), rows).to(wide)
        u, s, v = self.triple(name)
        shape, base = base.shape, as_matrix(base)
        out = torch.empty(base.shape, dtype=wide)
        left, right = (select_rows(u, rows).float() * s).to(wide), v.to(wide).T
        # In pieces that stay in cache between the copy and the product.
        step = max(1, _PIECE // max(1, base.shape[1]))
        for start in range(0, base.shape[0], step):
            piece = slice(start, start + step)
            out[piece].copy_(base[piece]).addmm_(left[piece], right)
        return out.view(shape)

    def _get_decoded(self, name: str) -> Tensor | Triple:
        # Several threads read blocks of rows, so the last few tensors are cached.
        return self._recent.get(name, lambda: self._decode(name))

    def _decode(self, name: str) -> Tensor | Triple:
        key, shape = self._keys[name][0], self.heads[name].shape
        found = decode(self._read_blob(key), shape, f"{self.path}: {key!r}")
        if self.kinds[name] == "factors":
            return found
        whole = dense(found).view(shape)
        return self.shared.change(name).view(shape) + whole if self.is_residual(name) and self.shared else whole

    def _read_blob(self, key: str) -> memoryview:
        return self.weights.read(key).contiguous().numpy().data


def _read_dropped(text: str, path: Path) -> dict[str, float]:
    """Return the energies of tensors that were not stored, from the metadata."""
    try:
        found = strict_json.parse_json(text, finite=True)
    except ValueError:
        found = None
    if not isinstance(found, dict) or not all(type(each) in (int, float) and each >= 0 for each in found.values()):
        raise CheckpointError(f"{path}: damaged: its metadata do not list dropped tensors with their energies")
    return found
