"""Submodules by names that are not Python's."""

from __future__ import annotations

from torch import nn


def adopt(owner: nn.Module, name: str, part: nn.Module) -> None:
    """Register a submodule under a name that may hold dots, which become slashes, or be that of an attribute.

    Args:
        owner: The module it becomes a part of.
        name: Its name there, in state dicts.
        part: The submodule.

    Example:
        >>> adopt(gates, "blocks.0", gate)  # gates.state_dict() has "blocks/0.weight"
    """
    owner._modules[name.replace(".", "/")] = part
