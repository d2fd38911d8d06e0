"""What a codec is, and what it sees of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from merganser.checkpoints.base import Checkpoint, Rows, TensorSpec
from merganser.errors import CheckpointError
from merganser.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

#: The longest tensor of settings that is read while a checkpoint is opened.
_SMALL = 1 << 16


@dataclass(frozen=True)
class Codec:
    """A weight that is stored as codes.

    Attributes:
        shape: The shape of the weight.
        stored: The names of the stored tensors it is made of; the first has the codes.
        decode: Returns the rows `[start, stop)` of the weight in float32, in memory of their own.
    """

    shape: tuple[int, ...]
    stored: tuple[str, ...]
    decode: Callable[[Rows], Tensor]


@dataclass(frozen=True)
class StoredCodes:
    """The tensors of a checkpoint as they are stored, and the quantisation settings of its config.

    Attributes:
        checkpoint: The checkpoint.
        settings: Its `quantization_config`; empty where there is none.
    """

    checkpoint: Checkpoint
    settings: Mapping[str, Any]

    @property
    def method(self) -> str:
        """The `quant_method` of the config; empty where there is none."""
        return str(self.settings.get("quant_method") or "").lower().replace("_", "-")

    def stems(self, end: str) -> Iterator[str]:
        """Yield what stands before `end` in the names that end so."""
        for name in self.checkpoint.names():
            if name.endswith(end):
                yield name[: -len(end)]

    def spec(self, name: str) -> TensorSpec | None:
        """Return shape and dtype of a tensor; None if there is no such one."""
        return self.checkpoint.spec(name) if name in self.checkpoint else None

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor that must be there."""
        return self.checkpoint.spec(name).shape

    def read(self, name: str, rows: Rows | None = None) -> Tensor:
        """Return a stored tensor, or rows of it."""
        return self.checkpoint.read(name, rows)

    def read_small(self, name: str) -> Tensor:
        """Return a tensor of settings, which is read whole while the checkpoint is opened."""
        if self.checkpoint.spec(name).nbytes > _SMALL:
            raise self.error(name, f"is too large for settings of at most {_SMALL} bytes")
        return self.checkpoint.read(name)

    def error(self, name: str, reason: str) -> CheckpointError:
        """Return the error of codes that do not fit together."""
        return CheckpointError(f"{self.checkpoint.label}: {name!r} ({self.spec(name)}) {reason}; the file is damaged?")

    def expect(self, name: str, *shapes: tuple[int, ...]) -> None:
        """Refuse a tensor of another shape than the codes beside it need."""
        if (spec := self.spec(name)) is None or spec.shape not in shapes:
            wanted = " or ".join(str(list(shape)) for shape in shapes)
            raise self.error(name, f"does not fit the codes beside it, which need the shape {wanted}")

    def read_groups(self, name: str, count: int) -> Tensor:
        """Return the group of each input, of so many groups."""
        found = self.read(name).to(torch.int64)
        if int(found.min()) < 0 or int(found.max()) >= count:
            raise self.error(name, f"names groups that are not among the {count} there are")
        return found
