"""Many experts of one base: the library (TSV-Compress), interference between them, adapters in and out."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_NAMES = {
    "Library": "merganser.experts.library",
    "Interference": "merganser.experts.survey",
    "interference": "merganser.experts.survey",
    "extract_lora": "merganser.experts.lora",
    "merge_adapters": "merganser.experts.lora",
}

__all__ = ["Interference", "Library", "extract_lora", "interference", "merge_adapters"]

if TYPE_CHECKING:
    from merganser.experts.library import Library
    from merganser.experts.lora import extract_lora, merge_adapters
    from merganser.experts.survey import Interference, interference


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        return getattr(import_module(_NAMES[name]), name)
    raise AttributeError(f"module 'merganser.experts' has no attribute {name!r}")
