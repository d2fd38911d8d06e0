"""Merging rules, one family a file. Importing this package registers them all."""

from merganser.methods import (
    adapters,
    averages,
    extremes,
    informed,
    isotropic,
    model_stock,
    pairs,
    ram,
    sce,
    schedules,
    spectral,
    spherical,
    tall,
    task_vectors,
    tsv,
    wudi,
)

__all__ = [
    "adapters",
    "averages",
    "extremes",
    "informed",
    "isotropic",
    "model_stock",
    "pairs",
    "ram",
    "sce",
    "schedules",
    "spectral",
    "spherical",
    "tall",
    "task_vectors",
    "tsv",
    "wudi",
]
