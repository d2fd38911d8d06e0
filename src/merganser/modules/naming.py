"""Register submodules under names that are not Python identifiers."""

from __future__ import annotations

from torch import nn


def adopt(owner: nn.Module, name: str, part: nn.Module) -> None:
    """Register a submodule under a name that may contain dots, which become slashes, or equal an attribute's name.

    Args:
        owner: The parent module.
        name: Its name there, in state dicts.
        part: The submodule.

    Example:
        >>> adopt(gates, "blocks.0", gate)  # gates.state_dict() has "blocks/0.weight"
    """
    owner._modules[name.replace(".", "/")] = part
