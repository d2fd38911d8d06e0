"""What an analysis or a tuning run hands back: frozen records of plain numbers that become JSON."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, is_dataclass
from typing import Any


def plain(value: Any) -> Any:
    """`value` in terms of JSON: records and mappings to objects, tuples to lists, non-finite numbers to null."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


@dataclass(frozen=True)
class Result:
    """Base of every record: fields hold numbers, strings, tuples, dicts and other records, never tensors."""

    def to_dict(self) -> dict[str, Any]:
        """The record as JSON-serialisable data, with the name of its type under `kind`."""
        return {"kind": type(self).__name__, **plain(self)}
