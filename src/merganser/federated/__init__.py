"""Federated learning: clients' models are aligned before they are averaged. Importable without Flower."""

from __future__ import annotations

from typing import TYPE_CHECKING

from merganser.lazy import exports

__getattr__, __dir__, __all__ = exports(
    __name__, {"aggregation": ("aggregate", "align_clients"), "strategies": ("aligned",)}
)

if TYPE_CHECKING:
    from merganser.federated.aggregation import aggregate as aggregate
    from merganser.federated.aggregation import align_clients as align_clients
    from merganser.federated.strategies import aligned as aligned
