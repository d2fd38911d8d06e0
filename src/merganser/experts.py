"""The old name of `library`, `interference` and `routing`, for one more version."""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import Any

_PACKAGES = ("library", "interference", "routing")
_RENAMED = {"Interference": "Survey", "interference": "survey"}


def __getattr__(name: str) -> Any:
    wanted = _RENAMED.get(name, name)
    for package in _PACKAGES:
        module = import_module(f"merganser.{package}")
        if wanted in module.__all__:
            warnings.warn(f"mg.experts.{name} is now mg.{package}.{wanted}", DeprecationWarning, stacklevel=2)
            return getattr(module, wanted)
    raise AttributeError(f"module 'merganser.experts' has no attribute {name!r}")
