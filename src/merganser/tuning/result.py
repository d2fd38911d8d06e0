"""What an analysis or a tuning run hands back: frozen records of plain numbers that become JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from merganser.plain import plain


@dataclass(frozen=True)
class Result:
    """Base of every record: fields hold numbers, strings, tuples, dicts and other records, never tensors."""

    def to_dict(self) -> dict[str, Any]:
        """The record as JSON-serialisable data, with the name of its type under `kind`."""
        return {"kind": type(self).__name__, **plain(self)}
