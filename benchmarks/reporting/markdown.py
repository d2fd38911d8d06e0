"""Parts as Markdown."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from benchmarks.reporting.parts import Figure, Part, Table, Text

WIDTH = 120


def paragraph(text: str) -> str:
    return "\n".join(textwrap.wrap(" ".join(text.split()), WIDTH, break_long_words=False, break_on_hyphens=False))


def table(part: Table) -> str:
    lines = [f"*{part.caption}*", ""] if part.caption else []
    lines += [_row(part.columns), "|" + "---|" * len(part.columns), *(_row(row) for row in part.rows)]
    return "\n".join(lines)


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def anchor(title: str) -> str:
    """What a heading is called in a link to it."""
    return "".join(c for c in title.lower().replace(" ", "-") if c.isalnum() or c in "-_")


def provenance(file: str, record: Mapping[str, Any]) -> str:
    """Where the numbers of a section come from, in one line; `file` is the record's place as the page sees it."""
    seeds = list(record["seeds"])
    known = f"; seed{'s' if len(seeds) > 1 else ''} {_ranges(seeds)}" if seeds else ""
    return (
        f"<sub>`{record['command']}`, {record['date']}, {record['machine']}{known}; "
        f"[{PurePosixPath(file).name}]({file})</sub>"
    )


def _ranges(seeds: Sequence[int]) -> str:
    if len(seeds) > 2 and list(seeds) == list(range(seeds[0], seeds[0] + len(seeds))):
        return f"{seeds[0]}–{seeds[-1]}"
    return ", ".join(map(str, seeds))


def write(part: Part, images: str = "images") -> str:
    """A part as Markdown; `images` is the directory of the drawings as the page sees it."""
    if isinstance(part, Text):
        return paragraph(part.text)
    if isinstance(part, Figure):
        return f"![{part.alt}]({images}/{part.name}.svg)"
    return table(part)
