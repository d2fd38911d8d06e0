"""The old name of `library`, `interference` and `routing`, for one more version."""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import Any

_ROOMS = ("library", "interference", "routing")
_RENAMED = {"Interference": "Survey", "interference": "survey"}


def __getattr__(name: str) -> Any:
    wanted = _RENAMED.get(name, name)
    for room in _ROOMS:
        module = import_module(f"merganser.{room}")
        if wanted in module.__all__:
            warnings.warn(f"mg.experts.{name} is now mg.{room}.{wanted}", DeprecationWarning, stacklevel=2)
            return getattr(module, wanted)
    raise AttributeError(f"module 'merganser.experts' has no attribute {name!r}")
