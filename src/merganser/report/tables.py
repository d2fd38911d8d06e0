"""Tables as data, and as plain text for terminals, logs and pipes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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

    def text(self) -> str:
        """Return the table as text, with padded columns, numbers right-aligned and to three digits."""
        numeric = [
            bool(self.rows) and all(isinstance(row[i], (int, float)) or row[i] is None for row in self.rows)
            for i in range(len(self.columns))
        ]
        cells = [list(self.columns), *([show(value) for value in row] for row in self.rows)]
        widths = [max(len(line[i]) for line in cells) for i in range(len(self.columns))]
        lines = [
            "  ".join(
                cell.rjust(width) if right else cell.ljust(width)
                for cell, width, right in zip(line, widths, numeric, strict=True)
            ).rstrip()
            for line in cells
        ]
        return "\n".join([*([self.caption] if self.caption else []), *lines])


def show(value: object) -> str:
    """Return one value as text for people; empty for None."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.3f}" if value == 0 or 1e-2 <= abs(value) < 1e3 else f"{value:.3g}"
    return str(value)
