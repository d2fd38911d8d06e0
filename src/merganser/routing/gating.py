"""Linear layers with several gated experts: y = W₀ x + b₀ + Σ_t p_t (U_t Σ_t V_tᵀ x + Δb_t)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from merganser.kernels.spectra import Factors
from merganser.library.library import Library
from merganser.modules.activations import linear_layers, unpacked
from merganser.routing.layer_updates import add_updates


@dataclass(frozen=True)
class ExpertStack:
    """The concatenated experts of one layer: left d × R, right m × R, the rank of each, bias updates tasks × d."""

    left: Tensor
    right: Tensor
    ranks: tuple[int, ...]
    bias: Tensor | None = None

    @classmethod
    def of(cls, factors: Sequence[Factors | None], like: Tensor, bias: Tensor | None = None) -> ExpertStack:
        d, m = like.shape
        left = [like.new_empty(d, 0) if f is None else (f.u * f.s).to(like) for f in factors]
        right = [like.new_empty(m, 0) if f is None else f.v.to(like) for f in factors]
        return cls(torch.cat(left, 1), torch.cat(right, 1), tuple(part.shape[1] for part in left), bias)

    def mixed(self, x: Tensor, gates: Tensor) -> Tensor:
        """Return the gated sum for inputs … × m and gates … × tasks; axes that the gates lack are those of tokens."""
        while gates.dim() < x.dim():
            gates = gates.unsqueeze(1)
        spread = torch.repeat_interleave(gates, torch.tensor(self.ranks, device=gates.device), dim=-1)
        update = ((x @ self.right) * spread) @ self.left.T
        return update if self.bias is None else update + gates @ self.bias


def stack_experts(library: Library, module: nn.Module, layers: Sequence[str] | None = None) -> dict[str, ExpertStack]:
    """Return stacks of the linear layers that some expert changed, from the library's factors.

    Layers that an expert has in another shape, such as a classifier, have none.
    """
    linears = linear_layers(module)
    found = {}
    for layer in linears if layers is None else layers:
        if not library.is_shared(f"{layer}.weight"):
            continue
        factors = [library.factors(name, f"{layer}.weight") for name in library.experts]
        if any(f is not None for f in factors):
            weight = linears[layer].weight.detach()
            found[layer] = ExpertStack.of(factors, weight, bias_updates(library, f"{layer}.bias", weight))
    return found


def bias_updates(library: Library, name: str, like: Tensor) -> Tensor | None:
    if name not in library.base:
        return None
    experts = [library.expert(task) for task in library.experts]
    return torch.stack([expert.delta(name).to(like) for expert in experts])


@contextmanager
def gated(
    module: nn.Module, experts: Mapping[str, ExpertStack], gate: Callable[[str, Tensor], Tensor]
) -> Iterator[set[str]]:
    """Add the experts to the module's layers inside the block; yields the layers whose weight was read without a
    call. The gate takes a layer's name and its input, and returns a row for each input row, or one for each sample.
    """
    linears = linear_layers(module)

    def update(layer: str, x: Tensor) -> Tensor:
        return experts[layer].mixed(x, gate(layer, x))

    with unpacked(module), add_updates({layer: linears[layer] for layer in experts}, update) as read:
        yield read
