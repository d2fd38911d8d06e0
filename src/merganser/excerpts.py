"""Shorten texts and lists for messages and tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal


def shorten(text: str, size: int, keep: Literal["ends", "start", "end"] = "ends") -> str:
    """Return a text of at most `size` letters: a longer one loses its middle, or all but its start or its end."""
    if len(text) <= size:
        return text
    if keep == "start":
        return f"{text[: size - 1]}…"
    if keep == "end":
        return f"…{text[len(text) - size + 1 :]}"
    return f"{text[: (size - 1) // 2]}…{text[len(text) - size // 2 :]}"


def list_some(names: Sequence[str], most: int) -> str:
    """Return the first names, and how many more there are: `a, b and 3 more`."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"
