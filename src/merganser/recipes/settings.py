"""Values that depend on where they are used: a number, a gradient over depth, or a choice by tensor name."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TypeAlias

Scalar: TypeAlias = float | int | bool | str | tuple[str, ...]


@dataclass(frozen=True)
class Gradient:
    """Values spread evenly over depth t ∈ [0, 1]. Numbers are interpolated linearly; other values change in steps."""

    values: tuple[Scalar, ...]

    @cached_property
    def numeric(self) -> bool:
        return all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in self.values)

    def at(self, t: float) -> Scalar:
        position = t * (len(self.values) - 1)
        below = int(position)
        if not self.numeric:
            return self.values[below]
        above = min(below + 1, len(self.values) - 1)
        part = position - below
        return (1 - part) * float(self.values[below]) + part * float(self.values[above])  # type: ignore[arg-type]


@dataclass(frozen=True)
class Case:
    """The `value` for tensors that match a glob."""

    pattern: str
    value: Scalar | Gradient

    def matches(self, name: str) -> bool:
        return matches(self.pattern, name)


@dataclass(frozen=True)
class Choice:
    """Chooses the first case that matches the tensor's name."""

    cases: tuple[Case, ...]


Setting: TypeAlias = Scalar | Gradient | Choice


@lru_cache(maxsize=4096)
def _compile_glob(pattern: str) -> Callable[[str], object]:
    return re.compile(fnmatch.translate(pattern)).match


def matches(pattern: str, name: str) -> bool:
    """Match a shell glob against the whole name; `*` also matches dots."""
    return _compile_glob(pattern)(name) is not None


def evaluate(setting: Setting, name: str, t: float) -> Scalar | None:
    """Return the setting's value for the tensor `name` at depth `t`, or None if no case matches."""
    if isinstance(setting, Choice):
        setting_for = next((case.value for case in setting.cases if case.matches(name)), None)
        return setting_for.at(t) if isinstance(setting_for, Gradient) else setting_for
    return setting.at(t) if isinstance(setting, Gradient) else setting
