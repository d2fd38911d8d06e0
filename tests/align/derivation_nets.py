"""Forward passes as functions, and the freedom a symmetry leaves."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from merganser.align import Symmetry


def freedom(found: Symmetry) -> dict[str, tuple[int, ...]]:
    """Every atom with the shape of its permutation array."""
    return {name: found.shape(name) for name in found.atoms}


class Net(nn.Module):
    """A forward pass written as a function of the module."""

    def __init__(self, forward: Callable[[nn.ModuleDict, Tensor], Tensor], **children: nn.Module) -> None:
        super().__init__()
        self.m = nn.ModuleDict(children)
        self.function = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.m, x)
