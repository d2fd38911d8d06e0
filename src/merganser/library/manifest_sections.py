"""Read objects of a manifest field by field, with checked types and no unknown fields."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from merganser.errors import CheckpointError, did_you_mean
from merganser.excerpts import shorten

#: Maximum length of a text in a manifest: paths, names and checksums.
LONGEST = 1 << 14
#: Maximum number in a manifest: sizes of files, ranks.
GREATEST = 1 << 60


class ManifestSection:
    """One object of a manifest. `where` names the file and the object in it, for messages."""

    def __init__(self, content: Any, where: str) -> None:
        self.where = where
        if not isinstance(content, dict):
            raise CheckpointError(f"{where}: damaged: expected an object, got {_show(content)}")
        self._content = content
        self._read: set[str] = set()

    def names(self) -> list[str]:
        return list(self._content)

    def has(self, key: str) -> bool:
        """Return whether the field is present and not null."""
        self._read.add(key)
        return self._content.get(key) is not None

    def section(self, key: str) -> ManifestSection:
        return ManifestSection(self._take(key), f"{self.where}: {_show(key)[1:-1]}")

    def text(self, key: str) -> str:
        value = self._take(key)
        if not isinstance(value, str) or len(value) > LONGEST or "\0" in value:
            raise self.damaged(key, "a text", value)
        return value

    def choice(self, key: str, known: Collection[str]) -> str:
        value = self.text(key)
        if value not in known:
            raise self.damaged(key, f"one of {', '.join(known)}", value)
        return value

    def flag(self, key: str) -> bool:
        value = self._take(key)
        if not isinstance(value, bool):
            raise self.damaged(key, "true or false", value)
        return value

    def count(self, key: str) -> int:
        value = self._take(key)
        if type(value) is not int or not 0 <= value <= GREATEST:
            raise self.damaged(key, "a whole number of at least 0", value)
        return value

    def optional_count(self, key: str) -> int | None:
        return None if self._take(key) is None else self.count(key)

    def number(self, key: str) -> float:
        value = self._take(key)
        if type(value) not in (int, float) or not 0 <= value <= GREATEST or math.isnan(value):
            raise self.damaged(key, "a number of at least 0", value)
        return value  # type: ignore[no-any-return]

    def done(self) -> None:
        """Refuse fields that were not read."""
        if left := next((key for key in self._content if key not in self._read), None):
            raise CheckpointError(f"{self.where}: damaged: unknown field {_show(left)}{did_you_mean(left, self._read)}")

    def damaged(self, key: str, expected: str, value: object) -> CheckpointError:
        """Return the error for an invalid field."""
        return CheckpointError(f"{self.where}: damaged: {_show(key)} must be {expected}, got {_show(value)}")

    def _take(self, key: str) -> Any:
        self._read.add(key)
        if key not in self._content:
            raise CheckpointError(f"{self.where}: damaged: {_show(key)} is missing")
        return self._content[key]


def _show(value: object) -> str:
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "a list"
    return shorten(repr(value[:100] if isinstance(value, str) else value), 100, "start")
