"""Imports on first use, for the names of packages and for libraries that take seconds to load.

Reading a recipe, planning from headers and listing methods need no tensors, but the modules that do so also define what
happens to tensors later. These modules import torch and numpy from here, and load them on first use:

    from merganser.lazy import torch

For type checkers, `torch` is the module itself; at run time it becomes the module once it is used.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

Action = Callable[[ModuleType], None]
#: Functions of modules that accept placeholders before their module is imported (`defer`).
_deferred: dict[str, dict[str, Callable[..., Any]]] = {}
#: What is to be done when a module is first used (`once_imported`).
_actions: dict[str, list[Action]] = {}
_acting = threading.RLock()


class LazyModule(ModuleType):
    """A module that is imported when one of its attributes is first accessed.

    A function may be deferred further (`defer`): until it is called with arguments that it needs the module for.
    """

    def __getattr__(self, name: str) -> Any:
        if not is_imported(self.__name__) and (function := _deferred.get(self.__name__, {}).get(name)):
            return function
        module = import_module(self.__name__)
        if actions := _actions.get(self.__name__):
            with _acting:  # other threads wait until all have run
                while actions:
                    actions[0](module)
                    del actions[0]
        value = getattr(module, name)
        self.__dict__[name] = value  # later accesses are as fast as in the module itself
        return value


def is_imported(module: str) -> bool:
    """Return whether a module has been imported, or is being imported."""
    return module in sys.modules


def defer(module: str, names: Iterable[str], kind: type, call: Callable[..., Any]) -> None:
    """Let functions of a lazy module accept placeholders without importing it.

    Args:
        module: The name of the module.
        names: The names of its functions.
        kind: The type of placeholders.
        call: Called instead of a function if its first argument is a placeholder, with the name and the arguments of
            the function.
    """

    def function(name: str) -> Callable[..., Any]:
        def choose(*args: Any, **options: Any) -> Any:
            if args and isinstance(args[0], kind):
                return call(name, *args, **options)
            return getattr(import_module(module), name)(*args, **options)

        return choose

    _deferred.setdefault(module, {}).update({name: function(name) for name in names})


@contextlib.contextmanager
def once_imported(module: str, action: Action) -> Iterator[None]:
    """Call `action` with a lazy module: now if it has been imported, else when it is first used inside the block."""
    if is_imported(module):
        action(import_module(module))
        yield
        return
    actions = _actions.setdefault(module, [])
    actions.append(action)
    try:
        yield
    finally:
        with _acting:
            if action in actions:
                actions.remove(action)


if TYPE_CHECKING:
    import numpy as np
    import torch as torch
else:
    np, torch = LazyModule("numpy"), LazyModule("torch")

__all__ = ["LazyModule", "defer", "exports", "is_imported", "np", "once_imported", "torch"]


def exports(
    package: str, names: Mapping[str, Iterable[str]], modules: Iterable[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package whose names are imported on first use.

    Type checkers need the same imports again, under `if TYPE_CHECKING`.

    Args:
        package: The name of the package.
        names: Its names, by the module that defines them; `.engine.merge` is `engine.merge` of the parent package.
        modules: Modules and packages inside it.
    """
    homes = {name: module for module, own in names.items() for name in own}
    whole = frozenset(modules)
    known = sorted({*homes, *whole})

    def get(name: str) -> Any:
        if name in homes:
            return getattr(import_module(f".{homes[name]}", package), name)
        if name in whole:
            return import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get, lambda: known, known
