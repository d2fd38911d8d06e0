"""Tables of any stored result: for records whose section has nothing special to say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.reporting.formats import number
from benchmarks.reporting.parts import Part, Table, Text


def tables(results: Any, title: str = "") -> Iterator[Part]:
    """Mappings of mappings and lists of mappings become tables, other values a sentence."""
    if isinstance(results, list):
        results = {str(position): row for position, row in enumerate(results, 1)}
    if not isinstance(results, Mapping):
        return
    simple = {key: value for key, value in results.items() if not isinstance(value, (Mapping, list))}
    simple |= {key: ", ".join(map(str, value)) for key, value in results.items() if _flat(value)}
    if simple:
        facts = "; ".join(f"{_words(key)} {number(value)}" for key, value in simple.items())
        yield Text(f"{title}: {facts}." if title else f"{facts[0].upper()}{facts[1:]}.")
    rest = {key: value for key, value in results.items() if key not in simple}
    rows = {key: _leaves(value) for key, value in rest.items()}
    if len(rows) > 1 and all(rows.values()):
        columns = list(dict.fromkeys(column for row in rows.values() for column in row))
        if len(columns) <= 10:
            cells = [[_words(key), *(number(row.get(column)) for column in columns)] for key, row in rows.items()]
            yield Table(["", *map(_words, columns)], cells, title)
            return
    for key, value in rest.items():
        yield from tables(value, f"{title}, {_words(key)}" if title else _words(key))


def _flat(value: object) -> bool:
    return isinstance(value, list) and len(value) <= 12 and not any(isinstance(each, (Mapping, list)) for each in value)


def _leaves(value: object) -> dict[str, object]:
    """A mapping's values if all of them are simple, else nothing."""
    if not isinstance(value, Mapping) or any(isinstance(each, (Mapping, list)) for each in value.values()):
        return {}
    return dict(value)


def _words(key: object) -> str:
    return str(key).replace("_", " ")
