"""What each family of operators does to axes. Importing this package fills the registry in `calls`."""

from merganser.align.tracing.rules import (
    contraction,
    convolution,
    indexing,
    joining,
    normalisation,
    pointwise,
    recurrence,
    reduction,
    reshaping,
    scattering,
)

__all__ = [
    "contraction",
    "convolution",
    "indexing",
    "joining",
    "normalisation",
    "pointwise",
    "recurrence",
    "reduction",
    "reshaping",
    "scattering",
]
