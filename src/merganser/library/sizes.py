"""The size of a library, and the findings of its verification."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Size:
    """Bytes of the base's weights, of the experts' files and of their shared part, and the ratio to the base."""

    base: int
    experts: Mapping[str, int]
    shared: int = 0

    @property
    def total(self) -> int:
        return self.base + self.shared + sum(self.experts.values())

    @property
    def ratio(self) -> float:
        return self.total / max(1, self.base)


@dataclass(frozen=True)
class Finding:
    """The result of `verify` for one part of a library. `sound` is None if it could not be determined."""

    part: str
    sound: bool | None
    message: str
