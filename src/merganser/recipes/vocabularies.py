"""One vocabulary for the output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Vocabulary:
    remaps: tuple[Any, ...]
    notes: tuple[str, ...] = ()


def unify(recipe: Any, table: Any) -> Vocabulary | None:
    return None
