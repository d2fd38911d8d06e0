"""The only reader of JSON: limited in size and depth, and strict about ambiguities."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

#: The largest published vocabularies and indices have some 40 MB; a safetensors header may have 100 MB.
MAX_BYTES = 1 << 27
#: The depth limit of safetensors' reference library.
MAX_DEPTH = 127
_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def parse_json(text: str | bytes, *, finite: bool = False) -> Any:
    """Return the value of a JSON text, or refuse a text that is too large, too deep or ambiguous.

    Args:
        text: The text; bytes are UTF-8 without a byte-order mark.
        finite: Refuse NaN and infinities, which JSON does not have but Python and its libraries write.

    Raises:
        ValueError: If the text is not JSON, is larger than `MAX_BYTES`, is nested deeper than `MAX_DEPTH`, repeats a
            key of an object, or contains half of a surrogate pair. No other error is raised.

    Example:
        >>> parse_json('{"layers": [1, 2]}')
        {'layers': [1, 2]}
    """
    if len(text) > MAX_BYTES:
        raise ValueError(f"{len(text):,} bytes, more than the limit of {MAX_BYTES:,}")
    if isinstance(text, bytes):
        text = text.decode("utf-8")  # its error is a ValueError
    hooks: dict[str, Any] = {}
    if finite:
        hooks = {"parse_constant": _refuse_constant, "parse_float": _finite, "parse_int": _whole}
    try:
        value = json.loads(text, object_pairs_hook=_unique, **hooks)
    except RecursionError:
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels") from None
    if text.count("[") + text.count("{") > MAX_DEPTH:
        _check_depth(value)
    if _ESCAPED_SURROGATE.search(text):
        json.dumps(value, ensure_ascii=False).encode("utf-8")  # raises a ValueError for half a pair
    return value


def read_json(file: Path, *, finite: bool = False) -> Any:
    """Return the value in a JSON file; see `parse_json`.

    Raises:
        OSError: If the file cannot be read.
        ValueError: As `parse_json`.
    """
    with file.open("rb") as stream:
        return parse_json(stream.read(MAX_BYTES + 1), finite=finite)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {twice!r} is repeated in one object")
    return found


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number in JSON")


def _whole(text: str) -> int | float:
    return -0.0 if text == "-0" else int(text)


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text} is too large for a number")
    return value


def _check_depth(value: Any) -> None:
    level, depth = [value], 0
    while level := [each for each in level if isinstance(each, (dict, list))]:
        depth += 1
        if depth > MAX_DEPTH:
            raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
        level = [inner for each in level for inner in (each.values() if isinstance(each, dict) else each)]
