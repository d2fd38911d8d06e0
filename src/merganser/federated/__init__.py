"""Federated learning: clients' models are aligned before they are averaged. Importable without Flower."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_NAMES = {
    "aggregate": "merganser.federated.aggregation",
    "align_clients": "merganser.federated.aggregation",
    "aligned": "merganser.federated.strategies",
}

__all__ = ["aggregate", "align_clients", "aligned"]

if TYPE_CHECKING:
    from merganser.federated.aggregation import aggregate, align_clients
    from merganser.federated.strategies import aligned


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        return getattr(import_module(_NAMES[name]), name)
    raise AttributeError(f"module 'merganser.federated' has no attribute {name!r}")
