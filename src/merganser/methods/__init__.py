"""Merging rules, one family a file. Importing this package registers them all."""

from merganser.methods import averages, extremes, informed, model_stock, pairs, ram, sce, spherical, tall, task_vectors

__all__ = [
    "averages",
    "extremes",
    "informed",
    "model_stock",
    "pairs",
    "ram",
    "sce",
    "spherical",
    "tall",
    "task_vectors",
]
