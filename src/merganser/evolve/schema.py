"""Read and write the records of a study: run files by hand, study files by this package, all by one declaration.

The records themselves (`Design`, `RunFile`, `StudyTask`, `SearchParameter`, `Objective`, `Search`, `Trial`) are frozen
dataclasses. Pydantic checks documents against them and reports every problem with its place.
"""

from __future__ import annotations

import json
from collections.abc import Hashable
from dataclasses import is_dataclass
from functools import cache
from typing import Any, ClassVar, TypeVar, cast, get_args, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from merganser.errors import InputError, closest, did_you_mean

T = TypeVar("T")
#: What pydantic calls types, in the words of YAML.
_WORDS = {"Input should be": "must be", "a valid array": "a list", "an object": "a mapping", "a valid string": "text"}
_TRIED = ("str", "float", "int", "bool")
_UNKNOWN, _MISSING = "unexpected_keyword_argument", ("missing", "missing_argument")


class SettingError(InputError, ValueError):
    """A setting that cannot be right. Being a ValueError, it is reported with its place when a document is read."""


class StudyRecord:
    """Base of the records of a study. A document has no other keys than the fields, and no value of another type."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)


@cache
def _adapter(kind: Hashable) -> TypeAdapter[Any]:
    return TypeAdapter(cast(Any, kind))


def to_document(record: Any) -> dict[str, Any]:
    """Return a record as JSON-serialisable values, for `from_document`."""
    found: dict[str, Any] = _adapter(cast(Hashable, type(record))).dump_python(record, mode="json")
    return found


def from_document(kind: type[T], document: Any) -> T:
    """Return the record that a document describes.

    Args:
        kind: The dataclass of the record.
        document: JSON-serialisable values, such as parsed YAML.

    Raises:
        InputError: If a key is unknown or missing, or a value impossible; every problem is a line of the message.

    Example:
        >>> from_document(SearchParameter, {"low": 0, "high": 1}).per
        'merge'
    """
    try:
        # Strict JSON reads lists as tuples and mappings as records; strict Python values would have to be these.
        found: T = _adapter(cast(Hashable, kind)).validate_json(json.dumps(document, default=str))
    except ValidationError as error:
        errors = error.errors()
        meant = {_find_meant(each, kind) for each in errors if each["type"] == _UNKNOWN}
        told = [each for each in errors if each["type"] not in _MISSING or tuple(each["loc"]) not in meant]
        lines = dict.fromkeys(_describe_error(each, kind) for each in told)
        raise InputError("\n".join(lines)) from None
    return found


def json_schema(kind: Any) -> dict[str, Any]:
    """Return the JSON Schema of a record."""
    return _adapter(kind).json_schema()


def _describe_error(error: Any, kind: Any) -> str:
    """Return the place, the problem, and the nearest known word."""
    location = list(error["loc"])
    # If several types are allowed, pydantic appends the one it tried.
    while len(location) > 1 and (location[-1] in _TRIED or str(location[-1]).startswith(("literal[", "tuple["))):
        location.pop()
    where = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in location).lstrip(".")
    parent, _, word = where.rpartition(".")
    if error["type"] == _UNKNOWN:
        prefix = f"{parent}: " if parent else ""
        return f"{prefix}unknown key {word!r}{did_you_mean(word, _list_keys(kind, location[:-1]))}"
    if error["type"] in _MISSING:
        return f"{parent}: {word!r} is missing" if parent else f"{word!r} is missing"
    if error["type"] == "value_error":
        return f"{where}: {error['ctx']['error']}" if where else str(error["ctx"]["error"])
    if error["type"] == "literal_error":
        return f"{where}: expected {error['ctx']['expected']}, got {error['input']!r}"
    said = str(error["msg"])
    for theirs, ours in _WORDS.items():
        said = said.replace(theirs, ours)
    return f"{where}: {said}, got {repr(error['input'])[:60]}"


def _find_meant(error: Any, kind: Any) -> tuple[Any, ...]:
    """Return the place of the key that an unknown key stands for: it is misspelt, not missing."""
    *parent, word = error["loc"]
    return (*parent, closest(str(word), _list_keys(kind, parent)))


def _list_keys(kind: Any, location: list[str | int]) -> list[str]:
    """Return the keys of the section at a place."""
    for part in location:
        hints = get_type_hints(kind) if is_dataclass(kind) else {}
        # Names in a mapping and numbers in a list lead to the section that it consists of.
        kind = hints.get(str(part)) or next(each for each in get_args(kind) if is_dataclass(each))
    return list(kind.__dataclass_fields__)
