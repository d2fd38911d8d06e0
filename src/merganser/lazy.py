"""Packages whose names are imported on first use: importing them is fast, and what is not used is not loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any


def exports(
    package: str, names: Mapping[str, Iterable[str]], modules: Iterable[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of a package, which has `names`, by the module they are in, and `modules`.

    Type checkers want the same imports once more, under `if TYPE_CHECKING`.
    """
    homes = {name: module for module, own in names.items() for name in own}
    whole = frozenset(modules)
    known = sorted({*homes, *whole})

    def get(name: str) -> Any:
        if name in homes:
            return getattr(import_module(f"{package}.{homes[name]}"), name)
        if name in whole:
            return import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get, lambda: known, known
