"""The exceptions of the package; every message says what is wrong, where, and what would be right."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from os import PathLike
from types import ModuleType
from typing import Any, ClassVar, get_args

#: What callers may catch; the functions below are for the package itself.
__all__ = [
    "CheckpointError",
    "InputError",
    "MerganserError",
    "MissingExtraError",
    "MissingTensorError",
    "RecipeError",
]


class MerganserError(Exception):
    """Work that failed. The command line prints the message and exits with `exit_code`."""

    exit_code: ClassVar[int] = 1


class InputError(MerganserError):
    """Invalid input that the user can correct; raised before any work starts."""

    exit_code: ClassVar[int] = 2


class CheckpointError(InputError):
    """A checkpoint that cannot be opened, trusted, or combined with the others."""


class MissingTensorError(CheckpointError, KeyError):
    """A tensor that a checkpoint does not have."""

    __str__ = Exception.__str__  # a KeyError would quote the message


class RecipeError(InputError):
    """A recipe with an impossible or unknown setting."""


class MissingExtraError(InputError):
    """An optional dependency is needed and not installed."""


def closest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that `word` probably misspells, or None."""
    options = sorted(known)
    swapped = [option for option in options if sorted(option) == sorted(word)]
    return next(iter(swapped or difflib.get_close_matches(word, options, n=1, cutoff=0.6)), None)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `"; did you mean 'density'?"` for a near miss, else the known words, else nothing."""
    options = sorted(known)
    if near := closest(word, options):
        return f"; did you mean {near!r}?"
    return f"; known: {', '.join(options)}" if 0 < len(options) <= 40 else ""


def one_of(what: str, value: object, known: Any) -> None:
    """Refuse a value that is not in a `Literal` or a collection of names."""
    names = get_args(known) or tuple(known)
    if value not in names:
        raise InputError(f"unknown {what} {value!r}{did_you_mean(str(value), names)}")


def require_mapping(what: str, given: object) -> None:
    """Refuse a list or a single object in place of a mapping from names to objects."""
    if not isinstance(given, Mapping):
        raise InputError(f"{what}: expected a mapping from names, as in {{'math': …}}, got a {type(given).__name__}")


@contextmanager
def reading(source: str | PathLike[str], error: type[InputError] = InputError, hint: str = "") -> Iterator[None]:
    """Turn failures to read a text into an error that names it; `hint` describes the expected content."""
    try:
        yield
    except UnicodeDecodeError:
        raise error(f"{source}: not a text in UTF-8{hint}") from None
    except OSError as failure:
        raise error(f"{source}: cannot be read: {failure.strerror or failure}") from None


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its type if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def require(module: str, extra: str) -> ModuleType:
    """Import an optional module, or raise an error that names the extra to install."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name.split(".")[0]):
            raise
        raise MissingExtraError(
            f"this needs {module!r}, which is not installed: pip install 'merganser[{extra}]'"
        ) from error
