"""Read files of questions: JSON lines, a JSON list, or tab-separated values. Errors name the file and the line."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from merganser.errors import InputError, did_you_mean, reading
from merganser.strict_json import parse_json

Records: TypeAlias = "Sequence[Mapping[str, Any]]"


@dataclass(frozen=True)
class Placed:
    """A record and its place, for messages."""

    place: str
    record: dict[str, Any]

    def field(self, name: str) -> Any:
        """Return a field; raise an error with the place if it is missing or empty."""
        value = self.record.get(name)
        if value is None:
            raise InputError(f"{self.place}: no {name!r}{did_you_mean(name, map(str, self.record))}")
        return value


def read_records(path: str | Path, fields: Sequence[str] = ("label", "text")) -> list[Placed]:
    """Read the records of a .jsonl, .json (a list) or .tsv file.

    Args:
        path: The file.
        fields: The fields that are needed. A .tsv file without a header has these columns in this order; where no
            others are needed, `label` and `text`.

    Returns:
        The records in their order, each with its place.

    Raises:
        InputError: If the file cannot be read, or a line is not a record.

    Example:
        >>> [each.record for each in read_records("quiz.jsonl")]  # doctest: +SKIP
    """
    source = Path(path)
    with reading(source):
        text = source.read_text(encoding="utf-8-sig")
    # Not splitlines: a JSON string may contain other line separators of Unicode.
    lines = [(number, line.rstrip("\r")) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if source.suffix == ".tsv":
        found = _read_table(source, lines, fields)
    elif source.suffix == ".json":
        whole = _parse_line(text, str(source))
        if not isinstance(whole, list):
            raise InputError(f"{source}: expected a list of records, one per question, not a {_name_kind(whole)}")
        found = [(f"{source}: record {number}", record) for number, record in enumerate(whole)]
    else:
        found = [(place, _parse_line(line, place)) for number, line in lines for place in [f"{source}, line {number}"]]
    if not found:
        raise InputError(f"{source}: contains no questions")
    for place, record in found:
        if not isinstance(record, dict):
            raise InputError(f'{place}: expected a record such as {{"question": …}}, not a {_name_kind(record)}')
    return [Placed(place, record) for place, record in found]


def _read_table(source: Path, lines: Sequence[tuple[int, str]], fields: Sequence[str]) -> list[tuple[str, Any]]:
    rows = list(csv.reader((line for _, line in lines), delimiter="\t", quoting=csv.QUOTE_NONE))
    header = ["label", "text"] if set(fields) <= {"label", "text"} else list(fields)
    if rows and set(fields) <= set(rows[0]):
        header, lines = rows.pop(0), lines[1:]
    found: list[tuple[str, Any]] = []
    for (number, _), row in zip(lines, rows, strict=True):
        place = f"{source}, line {number}"
        if len(row) > len(header):
            raise InputError(f"{place}: {len(row)} columns instead of {len(header)}: {', '.join(header)}")
        found.append((place, dict(zip(header, row, strict=False))))
    return found


def _parse_line(text: str, place: str) -> Any:
    try:
        return parse_json(text)
    except json.JSONDecodeError as error:
        where = f" at line {error.lineno}" if "\n" in text.strip() else ""
        raise InputError(f"{place}: not JSON{where}: {error.msg} (column {error.colno})") from None
    except ValueError as error:
        raise InputError(f"{place}: not valid JSON: {error}") from None


def _name_kind(value: Any) -> str:
    return {dict: "mapping", list: "list", str: "text", type(None): "null"}.get(type(value), type(value).__name__)
