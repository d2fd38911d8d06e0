"""Shorten long lists of tensors: names that differ only in a number become one name with a range."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Sequence
from typing import TypeVar

from merganser.report.tables import Table

Rest = TypeVar("Rest", bound=Hashable)
#: A name split into words and sets of numbers, alternating: "layers.3.w" is ("layers.", (3,), ".w").
NameParts = tuple[str | tuple[int, ...], ...]


def collapse(rows: Iterable[tuple[str, Rest]]) -> list[tuple[str, Rest]]:
    """Join rows that differ only in the numbers of their names, at the position of the first one.

    Numbers are joined from left to right; a row stands for every combination of its ranges.

    Example:
        >>> collapse([("h.0.w", "ties"), ("h.1.w", "ties"), ("h.2.w", "linear"), ("out", "ties")])
        [('h.[0-1].w', 'ties'), ('h.2.w', 'linear'), ('out', 'ties')]
    """
    found = [(_cut(name), rest) for name, rest in rows]
    for position in range(1, max((len(parts) for parts, _ in found), default=0), 2):
        found = _join(found, position)
    return [("".join(map(_show, parts)), rest) for parts, rest in found]


def collapse_table(table: Table) -> Table:
    """Return a table whose rows with equal figures, and names that differ only in numbers, are one row."""
    rows = collapse((str(name), tuple(rest)) for name, *rest in table.rows)
    fewer = len(rows) < len(table.rows)
    caption = f"{table.caption} (figures of a range are those of each)" if fewer and table.caption else table.caption
    return Table(table.columns, [(name, *rest) for name, rest in rows], caption)


def _cut(name: str) -> NameParts:
    # A number with leading zeros counts as a word, so that its digits are printed unchanged.
    pieces = re.split(r"(?<![^.])(0|[1-9]\d*)(?![^.])", name)
    return tuple((int(piece),) if index % 2 else piece for index, piece in enumerate(pieces))


def _join(rows: Sequence[tuple[NameParts, Rest]], position: int) -> list[tuple[NameParts, Rest]]:
    joined: dict[tuple[NameParts, Rest], tuple[int, ...]] = {}
    for parts, rest in rows:
        here = parts[position : position + 1]
        key = (*parts[:position], *((),) * len(here), *parts[position + 1 :]), rest
        joined[key] = joined.get(key, ()) + tuple(number for numbers in here for number in numbers)  # type: ignore[misc]
    return [
        ((*parts[:position], tuple(sorted(numbers)), *parts[position + 1 :]) if numbers else parts, rest)
        for (parts, rest), numbers in joined.items()
    ]


def _show(part: str | tuple[int, ...]) -> str:
    if isinstance(part, str):
        return part
    ranges: list[list[int]] = []
    for number in part:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    shown = ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
    return shown if len(part) == 1 else f"[{shown}]"
