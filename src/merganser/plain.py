"""Convert data to JSON-serialisable values, or to YAML text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any


def plain(value: Any) -> Any:
    """Convert records and mappings to objects, tuples to lists, and NaN and infinity, which JSON lacks, to null."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def float_rows(table: Iterable[Iterable[Any]]) -> tuple[tuple[float, ...], ...]:
    """Return the rows of a matrix as tuples of floats."""
    return tuple(tuple(float(value) for value in row) for row in table)


@dataclass(frozen=True)
class Result:
    """The result of an analysis or a tuning run: a record of numbers, strings, tuples, dicts and other records.

    It contains no tensors, so that it can be written as JSON.
    """

    def to_dict(self) -> dict[str, Any]:
        """Return the record as JSON-serialisable data, with the name of its type under `kind`."""
        return {"kind": type(self).__name__, **plain(self)}


def to_yaml(value: Any, compact: bool = False) -> str:
    """Return lists, mappings and plain values as YAML, in their own order; if compact, the innermost on one line."""
    import yaml

    style: dict[str, Any] = {"default_flow_style": None, "width": 120} if compact else {}
    text: str = yaml.safe_dump(value, sort_keys=False, allow_unicode=True, **style)
    return text
