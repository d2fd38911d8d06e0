"""Tables as data, and as plain text for terminals, logs and pipes."""

from __future__ import annotations

import math
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from merganser.excerpts import shorten


@dataclass(frozen=True)
class Link:
    """A cell that links to a part of the same page (see `Page.part`)."""

    text: str
    anchor: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Table:
    """Columns and rows, for a terminal (`text`) or a page (`Page.add`)."""

    columns: Sequence[str]
    rows: Sequence[Sequence[object]]
    caption: str = ""

    def text(self, width: int | None = None) -> str:
        """Return the table as text, with padded columns and numbers right-aligned.

        A table that is too wide breaks sentences in its last column, shortens its longest names, and then continues
        below with the columns that are left, each part with the first column again.

        Args:
            width: The columns that fit; by default those of the terminal.
        """
        numeric = [
            bool(self.rows) and all(isinstance(row[i], (int, float)) or row[i] is None for row in self.rows)
            for i in range(len(self.columns))
        ]
        cells = [list(self.columns), *([show(value) for value in row] for row in self.rows)]
        room = terminal_width() if width is None else width
        full = [max(len(line[i]) for line in cells) for i in range(len(self.columns))]
        kept = [number or _are_ranges([line[i] for line in cells[1:]]) for i, number in enumerate(numeric)]
        least = [size if keep else min(size, _LEAST) for size, keep in zip(full, kept, strict=True)]
        least[:1] = [_find_least_width([line[0] for line in cells], room)] if least else []
        narrow = _shrink(full, least, room)
        full[:1], least[:1] = narrow[:1], narrow[:1]  # the first column looks the same in every part
        parts = []
        for group in _group_columns(narrow, room):
            widths = _shrink([full[i] for i in group], [least[i] for i in group], room)
            chosen = [[line[i] for i in group] for line in cells]
            sentences = len(group) > 1 and any(line[-1].count(" ") >= _SENTENCE for line in chosen)
            parts.append(
                "\n".join(
                    "  ".join(
                        cell.rjust(size) if numeric[i] else cell.ljust(size)
                        for i, size, cell in zip(group, widths, row, strict=True)
                    ).rstrip()
                    for line in chosen
                    for row in _fit(line, widths, sentences)
                )
            )
        caption = textwrap.wrap(self.caption, max(40, room), break_long_words=False, break_on_hyphens=False)
        return "\n".join([*caption, "\n\n".join(parts)])


#: Texts with so many spaces are broken between words; others are names.
_SENTENCE = 3
#: Texts are not shortened below this many letters.
_LEAST = 12
#: Ranges of numbers, such as -0.327 to +0.327, which would be other numbers if shortened.
_RANGE = re.compile(r"(?=.{,18}$)[-+−]?\d[\d.,]* to [-+−]?\d[\d.,]*")


def _fit(line: Sequence[str], widths: Sequence[int], broken: bool) -> list[list[str]]:
    """Return the cells of a line at the widths of their columns: with more lines for the last cell if it is broken,
    else shortened.
    """
    *names, last = (shorten(cell, size) for cell, size in zip(line, widths, strict=True))
    if not broken:
        return [[*names, last]]
    first, *more = textwrap.wrap(line[-1], widths[-1], break_on_hyphens=False) or [""]
    return [[*names, first], *([*[""] * len(names), part] for part in more)]


def _are_ranges(cells: Sequence[str]) -> bool:
    return any(cells) and all(not cell or _RANGE.fullmatch(cell) for cell in cells)


def _shrink(widths: list[int], least: Sequence[int], room: int) -> list[int]:
    """Return the widths of columns, with the widest narrower, down to `least`, where the table would not fit."""
    found = list(widths)
    while (excess := sum(found) + 2 * (len(found) - 1) - room) > 0:
        shrinkable = [i for i in range(len(found)) if found[i] > least[i]]
        if not shrinkable:
            break
        widest = max(shrinkable, key=lambda i: found[i])
        others = max((found[i] for i in shrinkable if i != widest), default=0)
        found[widest] = max(least[widest], found[widest] - excess, min(others, found[widest] - 1))
    return found


def _find_least_width(names: Sequence[str], room: int) -> int:
    """Return the width at which the names of rows, shortened to half the room or more, still differ."""
    full, count = max(map(len, names), default=0), len(set(names))
    sizes = range(min(full, room // 2), full + 1)
    return next((size for size in sizes if len({shorten(name, size) for name in names}) == count), full)


def _group_columns(widths: Sequence[int], room: int) -> list[list[int]]:
    """Return the columns that stand beside each other, the first in every group."""
    groups, used = [[0]] if widths else [], sum(widths[:1])
    for i, width in enumerate(widths[1:], 1):
        if used + 2 + width > room and len(groups[-1]) > 1:
            groups.append([0])
            used = widths[0]
        groups[-1].append(i)
        used += 2 + width
    return groups


def terminal_width() -> int:
    """Columns of the terminal, or of COLUMNS; without either, as in a pipe, more than any line has."""
    known = "COLUMNS" in os.environ or sys.stdout.isatty()
    return shutil.get_terminal_size().columns if known else 10_000


def show(value: object) -> str:
    """Return one value as text for people, numbers with thousands separators; empty for None, a dash for
    NaN.
    """
    if value is None:
        return ""
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, float):
        if math.isnan(value):
            return "–"
        if 1e3 <= abs(value) < 1e9:
            return f"{value:,.0f}"
        return f"{value:.3f}" if value == 0 or 1e-2 <= abs(value) < 1e3 else f"{value:.3g}"
    return str(value)
