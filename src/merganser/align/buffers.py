"""Distinguish buffers that move with units from constants of the architecture.

Running statistics, the vectors of spectral normalisation and pruning masks have an entry per unit and differ between
models. Other buffers (rotary frequencies, position tables, masks) are the same in all models of an architecture, whose
code may recompute them at any time: they never move, and pin the axes they act on.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.utils.parametrizations import _SpectralNorm

from merganser.errors import InputError, did_you_mean

_STATISTICS = frozenset({"running_mean", "running_var"})


def moving_buffers(module: nn.Module, patterns: Sequence[str] = ()) -> frozenset[str]:
    """Return the names of the buffers that move with units: those known to, and those that match a pattern.

    Raises:
        InputError: If no buffer matches a pattern.
    """
    if isinstance(patterns, str):
        raise InputError(f"moving_buffers is a list of names: write moving_buffers=[{patterns!r}]")
    every = [name for name, _ in module.named_buffers(remove_duplicate=False)]
    moving = set()
    for pattern in patterns:
        found = [name for name in every if fnmatchcase(name, pattern)]
        if not found:
            raise InputError(f"no buffer matches {pattern!r}{did_you_mean(pattern, every)}")
        moving |= set(found)
    for prefix, owner in module.named_modules(remove_duplicate=False):
        moving |= {
            f"{prefix}.{name}" if prefix else name for name in owner._buffers if _has_entry_per_unit(owner, name)
        }
    return frozenset(moving & set(every))


def _has_entry_per_unit(owner: nn.Module, name: str) -> bool:
    stem, _, kind = name.rpartition("_")
    of_weight = kind in ("mask", "u", "v") and f"{stem}_orig" in owner._parameters  # pruning, spectral_norm
    return of_weight or isinstance(owner, _SpectralNorm) or not _STATISTICS.isdisjoint(owner._buffers)
