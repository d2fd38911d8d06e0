"""Ways to damage a file: at random, and where it hurts."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from typing import Any

#: Values that files should not have, and do.
HOSTILE: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 3, 2**31, 2**53, 2**63, 2**64, 10**9, 10**30, -0.5, 1e308, float("nan"), float("inf")),
    *("", ".", "..", "../precious.txt", "/etc/hostname", "a\0b", "\ud800", "x" * 5000, "{}", "(a+)+$", "base", "model"),
    *([], {}, [[]], [None], {"a": None}, [0] * 2000),
)


def mutate(content: bytes, rng: random.Random) -> bytes:
    """Damage a file in one to three ways."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        content = rng.choice(_ways(content))(content, rng)
    return content


def _ways(content: bytes) -> list[Callable[[bytes, random.Random], bytes]]:
    text = content.lstrip()[:1] in (b"{", b"[")
    header = len(content) > 10 and content[8:9] == b"{"
    structured = [_json] * 6 if text else [_header] * 6 if header else []
    return [_flip, _overwrite, _cut, _insert, _repeat, _number, *structured]


def _flip(content: bytes, rng: random.Random) -> bytes:
    damaged = bytearray(content or b"\0")
    for _ in range(rng.choice((1, 1, 2, 8))):
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
    return bytes(damaged)


def _overwrite(content: bytes, rng: random.Random) -> bytes:
    at, size = rng.randrange(len(content) + 1), rng.choice((1, 2, 4, 8, 32))
    return content[:at] + rng.choice((b"\0", b"\xff", b"\x7f", b"{", b'"', b"9", b"\n")) * size + content[at + size :]


def _cut(content: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(content) + 1)
    return content[:at] if rng.random() < 0.5 else content[:at] + content[at + rng.choice((1, 2, 7, 64)) :]


def _insert(content: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(content) + 1)
    new = rng.choice(
        (rng.randbytes(3), b"\xef\xbb\xbf", b"[" * 3000, b'{"a":' * 3000, b"NaN", b"-1", b"&a *a", b"\n---\n")
    )
    return content[:at] + new + content[at:]


def _repeat(content: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(content) + 1)
    part = content[start : start + rng.choice((1, 8, 40, 300))]
    return content[:start] + part * rng.choice((2, 3, 50)) + content[start:]


def _number(content: bytes, rng: random.Random) -> bytes:
    """A large number in place of some bytes: counts, offsets and lengths of binary formats."""
    form = rng.choice(("<I", "<Q", ">Q"))
    at = rng.randrange(max(1, min(len(content), 400)))
    packed = struct.pack(
        form, rng.choice((0, 1, 2**31, 2**32 - 1) if form == "<I" else (0, 1, 2**40, 2**63, 2**64 - 1))
    )
    return content[:at] + packed + content[at + len(packed) :]


def _json(content: bytes, rng: random.Random) -> bytes:
    """Another value, a lost or a repeated key somewhere in a JSON text."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return _flip(content, rng)
    holder: dict[str, Any] = {"": value}
    node, key = holder, ""
    while isinstance(inner := node[key], (dict, list)) and inner and rng.random() < 0.8:
        node, key = inner, rng.choice(list(inner) if isinstance(inner, dict) else range(len(inner)))
    kind = rng.randrange(6)
    if kind == 0 and node is not holder:
        del node[key]
    elif kind == 1 and isinstance(node, dict) and node is not holder:
        node[rng.choice(("", "..", "__metadata__", "pt", "x" * 300, "\ud800"))] = node.pop(key)
    elif kind == 2:
        node[key] = [node[key]]
    else:
        node[key] = rng.choice(HOSTILE)
    return json.dumps(holder[""], ensure_ascii=True).encode()


def _header(content: bytes, rng: random.Random) -> bytes:
    """The header of a safetensors file, damaged as JSON, with the right length before it."""
    length = int.from_bytes(content[:8], "little")
    header = _json(content[8 : 8 + length], rng)
    return len(header).to_bytes(8, "little") + header + content[8 + length :]
