"""Rules by name: their parameters, and building a rule from values."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, TypeVar, overload

from merganser.errors import InputError, RecipeError, did_you_mean
from merganser.methods import FAMILIES
from merganser.methods.base import Method
from merganser.methods.parameters import Parameter
from merganser.methods.plugins import load_plugins

_REGISTRY: dict[str, type[Method]] = {}
#: The module that registers each of our own names.
_MODULES = {name: f"merganser.methods.{family}" for family, names in FAMILIES.items() for name in names}
#: Methods of the literature that need data, with the function that computes each.
FUNCTIONS_OF_DATA = {
    "adamerging": "mg.tuning.adamerge",
    "greedy_soup": "mg.tuning.greedy_soup",
    "regmean_pp": "mg.tuning.regmean_pp",
}
M = TypeVar("M", bound=type[Method])


@overload
def register(cls: M) -> M: ...


@overload
def register(*, replace: bool = False) -> Callable[[M], M]: ...


def register(cls: M | None = None, *, replace: bool = False) -> M | Callable[[M], M]:
    """Register a rule by its `name` and the names in `also`; a class decorator.

    Args:
        cls: The class, if the decorator is used without arguments.
        replace: Replace rules with these names, for example when a notebook cell is run again.

    Raises:
        InputError: If a name belongs to another rule.

    Example:
        >>> @register(replace=True)
        ... @dataclass(frozen=True)
        ... class Mine(Method):
        ...     name = "mine"
    """
    if cls is None:
        return lambda decorated: _register(decorated, replace)
    return _register(cls, replace)


def _register(cls: M, replace: bool) -> M:
    names = (cls.name, *cls.also)
    for name in names:
        if name in _MODULES and _MODULES[name] != cls.__module__:
            import_module(_MODULES[name])
        if name in _REGISTRY and not replace:
            raise InputError(
                f"two methods are called {name!r}; choose another name, or register(replace=True) to replace the first"
            )
    replaced = {_REGISTRY[name] for name in names if name in _REGISTRY}
    for name in [name for name, method in _REGISTRY.items() if method in replaced]:
        del _REGISTRY[name]
    _REGISTRY.update(dict.fromkeys(names, cls))
    return cls


def registry() -> Mapping[str, type[Method]]:
    """Return every method by its own name, sorted, including those of installed plugins."""
    for family in FAMILIES:
        import_module(f"merganser.methods.{family}")
    load_plugins()
    return {name: method for name, method in sorted(_REGISTRY.items()) if name == method.name}


def lookup(name: str, where: str = "method") -> type[Method]:
    """Return the method of that name, which may be an alias.

    Raises:
        RecipeError: If there is none; the message suggests a similar name, or the function of `mg.tuning` to call.
    """
    if name in _MODULES:
        import_module(_MODULES[name])
    failures = load_plugins()
    if name in FUNCTIONS_OF_DATA:
        raise RecipeError(f"{where}: {name!r} needs data, so recipes cannot use it; call {FUNCTIONS_OF_DATA[name]}")
    if name not in _REGISTRY:
        hint = did_you_mean(name, (*registry(), *FUNCTIONS_OF_DATA))
        broken = "".join(f"; the plugin {package} could not be imported ({why})" for package, why in failures.items())
        raise RecipeError(f"{where}: unknown method {name!r}{hint}{broken}")
    return _REGISTRY[name]


@functools.cache
def parameters(method: type[Method]) -> Mapping[str, Parameter]:
    """Return the hyper-parameters of a rule, in order of declaration."""
    hints = typing.get_type_hints(method)
    found = {}
    for entry in dataclasses.fields(method):
        declared: Parameter = entry.metadata["parameter"]
        kind = typing.get_args(hints[entry.name])[0] if declared.per_model else hints[entry.name]
        if type(None) in typing.get_args(kind):
            kind = next(k for k in typing.get_args(kind) if k is not type(None))
        found[entry.name] = dataclasses.replace(declared, name=entry.name, kind=typing.get_origin(kind) or kind)
    return found


def aliases(method: type[Method]) -> dict[str, str]:
    """Return other tools' names for this rule's parameters: alias -> own name."""
    return {alias: p.name for p in parameters(method).values() for alias in p.aliases}


def mergekit_defaults(method: type[Method]) -> dict[str, Any]:
    """Return the defaults of a mergekit recipe that differ from ours."""
    return {p.name: p.mergekit for p in parameters(method).values() if p.mergekit is not None}


def build(method: type[Method], values: Mapping[str, Any], models: Sequence[str]) -> Method:
    """Return the rule for one tensor from resolved values (sequences for per-model ones), checked and with defaults."""
    known = parameters(method)
    for name in values:
        if name not in known:
            raise RecipeError(f"unknown parameter {name!r} of method {method.name!r}{did_you_mean(name, known)}")
    settings: dict[str, Any] = {}
    for name, parameter in known.items():
        value = values.get(name, parameter.default)
        if name not in values and parameter.required:
            raise RecipeError(f"method {method.name!r} needs the parameter {name!r} ({parameter.help})")
        if not parameter.per_model:
            settings[name] = value if name not in values else parameter.check(value, f"{method.name}.{name}")
            continue
        each = value if isinstance(value, (list, tuple)) else [value] * len(models)
        if len(each) != len(models):
            raise RecipeError(f"{method.name}.{name}: {len(each)} values for {len(models)} models")
        settings[name] = tuple(
            None if v is None and parameter.default is None else parameter.check(v, f"{method.name}.{name} of {model}")
            for v, model in zip(each, models, strict=True)
        )
    return method(**settings)
