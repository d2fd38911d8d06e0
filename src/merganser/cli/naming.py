"""Names on a command line: NAME=VALUE, and short names for checkpoints without one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from merganser.errors import InputError

_GENERIC = {"model", "pytorch_model", "adapter_model", "weights", "checkpoint"}
_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf"}


def name_checkpoints(references: Sequence[str]) -> dict[str, str]:
    """Return a mapping of name to reference, in order.

    A reference NAME=CKPT keeps its name. Any other is named after the last distinctive part of its path, with a
    number where two are equal.
    """
    named: dict[str, str] = {}
    for text in references:
        given, separator, path = text.partition("=")
        if separator and given and path and "/" not in given and not Path(text).exists():
            if given in named:
                raise InputError(f"two checkpoints are called {given!r}")
            named[given] = path
            continue
        name = short = _shorten_path(text)
        count = 1
        while name in named:
            count += 1
            name = f"{short}-{count}"
        named[name] = text
    return named


def read_pairs(texts: Iterable[str], form: str, option: str = "") -> dict[str, str]:
    """Return the mapping that texts such as NAME=FILE write; `form` is how messages describe one of them.

    Raises:
        InputError: If one side is missing, or a name is given twice.
    """
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise InputError(f"{option} {text}: expected {form}".lstrip())
        if name in found:
            raise InputError(f"{option} {name!r} is given twice: {found[name]} and {value}".lstrip())
        found[name] = value
    return found


def _shorten_path(reference: str) -> str:
    path = Path(reference)
    stem = path.stem if path.suffix in _SUFFIXES else path.name
    return path.resolve().parent.name if stem in _GENERIC or stem in ("", "..") else stem
