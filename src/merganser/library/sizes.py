"""What a library takes, and what a check of it found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Size:
    """Bytes: the base's weights, the files of the experts, what they share, and how much the whole is of the base."""

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
    """What `verify` has to say of one part of a library. `sound` is None where it could not be found out."""

    part: str
    sound: bool | None
    message: str
