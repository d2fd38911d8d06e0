"""A model in place of a part of another model: an LLM as the language part of a vision-language model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from merganser.checkpoints.base import Checkpoint, Rows, TensorSpec, View, hash_text
from merganser.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor


class Grafted(View):
    """A whole model with a part replaced by another model, whose names are mapped by prefix.

    Tensors that the part lacks come from the whole, so that a task vector is zero there. Tensors that the whole lacks
    keep their own names.

    Example:
        >>> import torch
        >>> from merganser.checkpoints.memory import StateDict
        >>> whole = StateDict({"language.a": torch.zeros(2), "vision.b": torch.ones(2)})
        >>> Grafted(whole, StateDict({"model.a": torch.full((2,), 5.0)}), {"model.": "language."}).read("language.a")
        tensor([5., 5.])
    """

    def __init__(self, whole: Checkpoint, part: Checkpoint, prefixes: Mapping[str, str]) -> None:
        """Map the names of a part.

        Args:
            whole: The model with all other tensors.
            part: The model to insert.
            prefixes: Prefixes of the part's names -> prefixes in the whole; the longest match counts.

        Raises:
            CheckpointError: If no name of the part, or none of the whole, starts with a prefix.
        """
        super().__init__(whole, part.label)
        self.directory = part.directory
        self._part = part
        self._places: dict[str, str] = {}
        found = dict.fromkeys(prefixes, False)
        used = dict.fromkeys(prefixes, False)
        for name in (*part.names(), *part.aliases()):
            prefix = max((each for each in prefixes if name.startswith(each)), key=len, default=None)
            target = name if prefix is None else prefixes[prefix] + name.removeprefix(prefix)
            if prefix is not None:
                used[prefix] = True
                found[prefix] |= target in whole
            self._places[target] = name
        for prefix, target in prefixes.items():
            if not used[prefix]:
                raise CheckpointError(f"{part.label}: no tensor's name begins with {prefix!r}, the prefix to map")
            if not found[prefix]:
                raise CheckpointError(
                    f"{whole.label}: no tensor's name begins with {target!r}, the prefix it is mapped to"
                )
        own = [target for target, name in self._places.items() if name not in part.aliases()]
        self._names = [*whole.names(), *(name for name in own if name not in whole)]

    def names(self) -> Sequence[str]:
        return self._names

    def spec(self, name: str) -> TensorSpec:
        return self._part.spec(self._places[name]) if name in self._places else self.source.spec(name)

    def read(self, name: str, rows: Rows | None = None) -> Tensor:
        return self._part.read(self._places[name], rows) if name in self._places else self.source.read(name, rows)

    def overhead(self, name: str, entries: int) -> int:
        if name in self._places:
            return self._part.overhead(self._places[name], entries)
        return super().overhead(name, entries)

    def prefetch(self, name: str, rows: Rows | None = None) -> None:
        if name in self._places:
            self._part.prefetch(self._places[name], rows)
        else:
            super().prefetch(name, rows)

    def fingerprint(self) -> str:
        own = f"{self.source.fingerprint()} {self._part.fingerprint()} {sorted(self._places.items())}"
        return hash_text(own)

    def files(self) -> Sequence[Path]:
        return [*self._part.files(), *self.source.files()]
