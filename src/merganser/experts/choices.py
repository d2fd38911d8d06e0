"""Settings with a few possible values, checked where they are given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from merganser.errors import InputError, did_you_mean


def one_of(what: str, value: str, known: Any) -> None:
    """Refuse a value that is not among those of a `Literal` (or of a sequence of names)."""
    names: Sequence[str] = get_args(known) or tuple(known)
    if value not in names:
        raise InputError(f"{what} {value!r}{did_you_mean(str(value), names)}")


def at_least_one(what: str, value: int) -> None:
    """Refuse numbers of things below one."""
    if value < 1:
        raise InputError(f"{what} {value}: must be at least 1")
