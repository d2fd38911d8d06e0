"""Detect tensors that share memory: tied weights are one weight."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import torch


def identity(tensor: torch.Tensor) -> Hashable:
    """Return a key that is equal for tensors that are the same view of the same memory."""
    if tensor.is_meta or tensor.numel() == 0:
        return id(tensor)
    return (tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)


def overlapping(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors that share memory with another one without being the same view of it."""
    found: list[torch.Tensor] = []
    furthest: dict[torch.device, tuple[int, torch.Tensor]] = {}
    for tensor in sorted((t for t in tensors if not t.is_meta and t.numel()), key=lambda t: t.data_ptr()):
        start, end = tensor.data_ptr(), tensor.data_ptr() + _extent(tensor)
        reached, other = furthest.get(tensor.device, (start, tensor))
        if start < reached and identity(tensor) != identity(other):
            found += [tensor, other]
        if end > reached:
            furthest[tensor.device] = (end, tensor)
    return found


def _extent(tensor: torch.Tensor) -> int:
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (steps + 1) * tensor.element_size()
