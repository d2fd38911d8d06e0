"""Read single fields of a recipe; every error names its place."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from merganser.checkpoints.dtypes import ALIASES, FLOATS
from merganser.errors import InputError, RecipeError, closest, did_you_mean
from merganser.methods.base import Method
from merganser.methods.parameters import Parameter
from merganser.methods.registry import aliases as parameter_aliases
from merganser.methods.registry import parameters as method_parameters
from merganser.recipes.references import describe_places, find_missing
from merganser.recipes.schema import Problems
from merganser.recipes.settings import Case, Choice, Gradient, Scalar, Setting
from merganser.units import parse_size

_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", re.IGNORECASE)
_TRUTHS = {"true": True, "false": False}
_KINDS = {dict: "a mapping", list: "a list", str: "text", bool: "true or false", int: "a whole number"}


class _Reported:
    """The type of `REPORTED`."""


#: Placeholder in a translated document for a value whose problem was already reported.
REPORTED = _Reported()


def kind_of(value: Any) -> str:
    """Return how a message describes a value."""
    if value is None:
        return "nothing"
    if isinstance(value, (dict, list)):
        return _KINDS[type(value)]
    return repr(value)


def unquote(value: Any) -> Any:
    """Return the number or boolean that a text spells, such as `'0.6'` or `'false'`; other values unchanged."""
    if not isinstance(value, str):
        return value
    text = value.strip()
    if text.lower() in _TRUTHS:
        return _TRUTHS[text.lower()]
    return _number(text) if _NUMBER.fullmatch(text) else value


def _number(text: str) -> int | float:
    return int(text) if text.lstrip("+-").isdigit() and len(text) < 19 else float(text)


def expect(value: Any, kind: type, where: str) -> Any:
    """Return the value if it is of that kind, else raise an error that names the place.

    Numbers and truth values may be in quotes, and whole numbers may be written `6.0`.
    """
    if kind in (int, bool):
        plain = unquote(value)
        plain = int(plain) if kind is int and isinstance(plain, float) and plain.is_integer() else plain
        if type(plain) is kind:
            return plain
    elif isinstance(value, kind):
        return value
    raise RecipeError(f"{where}: expected {_KINDS[kind]}, got {kind_of(value)}")


def misspelt(data: Mapping[str, Any], known: Iterable[str]) -> set[str]:
    """Return the known keys that are missing because unknown keys misspell them, so that they need no second report."""
    known = tuple(known)
    return {near for key in data if key not in known and (near := closest(str(key), known))} - set(data)


def report_unknown_keys(
    data: Mapping[str, Any],
    known: Iterable[str],
    where: str,
    problems: Problems,
    elsewhere: Mapping[str, Iterable[str]] | None = None,
) -> None:
    """Report unknown keys, and the section of keys that belong `elsewhere`.

    At the top, keys that start with `x-` belong to the author (for anchors).
    """
    known = tuple(known)
    for key in data:
        if key not in known and not (where == "" and str(key).startswith("x-")):
            section = next((name for name, keys in (elsewhere or {}).items() if key in keys), None)
            hint = did_you_mean(str(key), known) if section is None else f"; write it under {section!r}"
            problems.add(where, f"unknown key {key!r}{hint}")


def finish(problems: Problems, references: Iterable[tuple[str, str]], root: Path | None, source: str) -> None:
    """Raise all problems of a document and, if there are any, also list the models it names that do not exist."""
    if problems:
        for where, reference in references:
            if (path := find_missing(reference, root)) is not None:
                problems.add(where, f"{path}: no such file or directory{describe_places(path, root)}")
    problems.finish(source)


def read_dtype(value: Any, where: str) -> str:
    name: str = expect(value, str, where).removeprefix("torch.")
    name = ALIASES.get(name, name)
    if name not in FLOATS:
        raise RecipeError(f"{where}: unknown dtype {value!r}{did_you_mean(name, FLOATS)}")
    return name


def read_size(value: Any, where: str) -> int:
    """Return a number of bytes from `5GB`, `2GiB` or a number."""
    plain = isinstance(value, (str, int, float)) and not isinstance(value, bool)
    try:
        found = parse_size(str(value)) if plain else 0
    except InputError:
        found = 0
    if found <= 0:
        raise RecipeError(f"{where}: expected a size such as 5GB or 2GiB, got {kind_of(value)}")
    return found


def read_globs(value: Any, where: str) -> tuple[str, ...]:
    """Return patterns over tensor names, given as one or as a list."""
    return read_texts(value, where, "a glob over tensor names")


def read_texts(value: Any, where: str, what: str) -> tuple[str, ...]:
    """Return texts, given as one or as a list."""
    found = [value] if isinstance(value, str) else value or []
    if not isinstance(found, list) or not all(isinstance(text, str) and text for text in found):
        raise RecipeError(f"{where}: expected {what} or a list of them, got {kind_of(value)}")
    return tuple(found)


def read_layer_range(value: Any, where: str) -> tuple[int, int]:
    if not isinstance(value, list) or len(value) != 2:
        raise RecipeError(f"{where}: expected [first, last) as two whole numbers, got {kind_of(value)}")
    first, last = (expect(v, int, f"{where}[{i}]") for i, v in enumerate(value))
    if not 0 <= first < last:
        raise RecipeError(f"{where}: [{first}, {last}] contains no layer; expected 0 <= first < last")
    return first, last


class Declared:
    """The parameters of a recipe's methods, by name and alias, or by a dialect's `names` (its name -> our name)."""

    def __init__(self, methods: Iterable[type[Method]], names: Mapping[str, str] | None = None) -> None:
        self.methods = tuple(methods)
        self.known: dict[str, list[Parameter]] = {}
        self.names: dict[str, str] = dict(names or {})
        for method in self.methods:
            for name, parameter in method_parameters(method).items():
                self.known.setdefault(name, []).append(parameter)
            if names is None:
                self.names |= {name: name for name in method_parameters(method)}
                self.names = parameter_aliases(method) | self.names

    @property
    def title(self) -> str:
        names = sorted({method.name for method in self.methods})
        return f"method {names[0]!r}" if len(names) == 1 else "methods " + ", ".join(map(repr, names))

    def find(self, name: str) -> tuple[str, list[Parameter]] | None:
        own = self.names.get(name)
        return (own, self.known[own]) if own else None

    def unknown(self, name: str) -> str:
        return f"unknown parameter {name!r} of {self.title}{did_you_mean(name, self.names)}"


def read_scalar(value: Any, candidates: list[Parameter], where: str) -> Scalar:
    """Return the value as one of the candidate parameters accepts it, or raise the error of the first."""
    complaint: RecipeError | None = None
    for parameter in candidates:
        textual = parameter.choices is not None or parameter.kind in (str, tuple)
        try:
            checked: Scalar = parameter.check(value if textual else unquote(value), where)
            return checked
        except RecipeError as error:
            complaint = complaint or error
    raise complaint or RecipeError(f"{where}: unknown parameter")


def read_value(value: Any, candidates: list[Parameter], where: str) -> Scalar | Gradient:
    takes_lists = any(parameter.kind is tuple for parameter in candidates)
    if not isinstance(value, list) or takes_lists:
        if isinstance(value, dict):
            raise RecipeError(f"{where}: expected a value, got a mapping")
        return read_scalar(value, candidates, where)
    if not value:
        raise RecipeError(f"{where}: a gradient needs at least one value")
    # An interpolated value lies between its neighbours, so checking the given values checks them all.
    return Gradient(tuple(read_scalar(v, candidates, f"{where}[{i}]") for i, v in enumerate(value)))


def read_choice(value: Any, candidates: list[Parameter], where: str) -> Choice | None:
    """Read `{"*.mlp.*": 0.2, "*": 0.5}`: a value per pattern, where the first match wins."""
    if isinstance(value, list) and value and all(isinstance(v, dict) and "value" in v for v in value):
        raise RecipeError(
            f'{where}: lists of filter and value are mergekit\'s format; here write {{"*.mlp.*": value, "*": value}}'
        )
    if not isinstance(value, dict):
        return None
    if not value:
        raise RecipeError(f"{where}: expected a value for each glob, got an empty mapping")
    return Choice(
        tuple(Case(str(glob), read_value(each, candidates, f"{where}[{str(glob)!r}]")) for glob, each in value.items())
    )


def read_settings(data: Any, declared: Declared, where: str, problems: Problems) -> dict[str, Setting]:
    """Read named parameters, each a scalar, a gradient, or a value by glob."""
    found: dict[str, Setting] = {}
    if data is None:
        return found
    if not isinstance(data, dict):
        problems.add(where, f"expected a mapping of parameters, got {kind_of(data)}")
        return found
    for key, value in data.items():
        place = f"{where}.{key}" if where else str(key)
        known = declared.find(str(key))
        if known is None:
            problems.add(where or "parameters", declared.unknown(str(key)))
            continue
        with problems.collect():
            if known[0] in found:
                raise RecipeError(f"{place}: {known[0]!r} is given twice, once under another name")
            choice = read_choice(value, known[1], place)
            found[known[0]] = choice if choice is not None else read_value(value, known[1], place)
    return found
