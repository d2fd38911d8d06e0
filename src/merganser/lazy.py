"""Imports on first use, for the names of packages and for libraries that take seconds to load.

Reading a recipe, planning from headers and listing methods need no tensors, but the modules that do so also define what
happens to tensors later. These modules import torch and numpy from here, and load them on first use:

    from merganser.lazy import torch

For type checkers, `torch` is the module itself; at run time it becomes the module once it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any


class LazyModule(ModuleType):
    """A module that is imported when one of its attributes is first accessed."""

    def __getattr__(self, name: str) -> Any:
        value = getattr(import_module(self.__name__), name)
        self.__dict__[name] = value  # later accesses are as fast as in the module itself
        return value


if TYPE_CHECKING:
    import numpy as np
    import torch as torch
else:
    np, torch = LazyModule("numpy"), LazyModule("torch")

__all__ = ["LazyModule", "exports", "np", "torch"]


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
