"""Tables of plain text: what a terminal, a log and a pipe can all show."""

from __future__ import annotations

from collections.abc import Sequence


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns padded to their widest cell: numbers to the right, text to the left, three significant places."""
    numeric = [
        bool(rows) and all(isinstance(row[i], (int, float)) or row[i] is None for row in rows)
        for i in range(len(columns))
    ]
    cells = [list(columns), *([show(value) for value in row] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, numeric, strict=True)
        ).rstrip()
        for line in cells
    )


def show(value: object) -> str:
    """One value as a person wants to read it; nothing for None."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.3f}" if value == 0 or 1e-2 <= abs(value) < 1e3 else f"{value:.3g}"
    return str(value)
