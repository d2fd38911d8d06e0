"""SMILE: experts chosen for every token and layer by their singular vectors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from merganser.library.library import Library
from merganser.modules.inputs import Inputs
from merganser.routing.baselines.base import check_at_least_one
from merganser.routing.baselines.gated import GatedBaseline, Gates
from merganser.routing.composition import Composition
from merganser.routing.gating import ExpertStack, stack_experts
from merganser.routing.heads import HeadLike, HeadScore
from merganser.routing.models import Features


class Smile(GatedBaseline):
    """Experts chosen for every token and layer by their singular vectors (SMILE).

    y = W₀ x + Σ_{t ∈ top} p_t U_t Σ_t V_tᵀ x in every linear layer, with p the softmax of ‖V_tᵀ x‖ over the top tasks
    and V_t the first `gate_rank` singular vectors. Other tensors get the mean of their updates. The task is found by
    vote: in each layer the task that most tokens chose, then the task that most layers chose. With `gate_rank=1` and
    `top=4`, this is Arrow (Ostapenko et al. 2024) for experts in low-rank form.

    Args:
        module: The network. It must hold the base's weights.
        library: The experts.
        heads: The classification head of every expert, by its name.
        top: How many experts each token gets.
        gate_rank: How many singular vectors the gates use.
        features: Turns the module's output and inputs into what the heads read, shape (samples, width). Needed
            unless the output itself has this shape.
        score: How answers of different heads are compared: `"logit"`, `"probability"` or `"posterior"`.

    Example:
        >>> model = mg.routing.Smile(encoder, library, heads, top=1, gate_rank=4)
        >>> tasks = model(images).tasks
    """

    def __init__(
        self,
        module: nn.Module,
        library: Library,
        heads: Mapping[str, HeadLike],
        *,
        top: int = 1,
        gate_rank: int = 16,
        features: Features | None = None,
        score: HeadScore = "logit",
    ) -> None:
        check_at_least_one("top", top)
        check_at_least_one("gate_rank", gate_rank)
        super().__init__(module, library, heads, features=features, score=score)
        self.top, self.gate_rank = min(top, len(library)), gate_rank
        self.derive()

    def derive(self) -> None:
        self.stacks = stack_experts(self.library, self.module)
        self.directions = {layer: _leading(stack, self.gate_rank) for layer, stack in self.stacks.items()}
        self.rest = self.ungated()

    def ungated(self) -> Composition:
        return self.averaged(1 / len(self.library), apart_from=self.stacks)

    def open_gates(self, inputs: Inputs) -> Gates:
        return _TokenGates(self.directions, self.top, inputs, len(self.library))


class _TokenGates(Gates):
    def __init__(self, directions: Mapping[str, Sequence[Tensor]], top: int, inputs: Inputs, tasks: int) -> None:
        self._directions, self._top, self._mask = directions, top, inputs.mask
        self._votes = torch.zeros(inputs.size, tasks)

    def __call__(self, layer: str, x: Tensor) -> Tensor:
        scores = torch.stack([(x @ v).norm(dim=-1) for v in self._directions[layer]], dim=-1)
        best = scores.topk(self._top, dim=-1)
        samples = len(self._votes)
        if x.shape[0] == samples:
            self._votes[torch.arange(samples), self._mode(best.indices[..., 0])] += 1
        return torch.zeros_like(scores).scatter(-1, best.indices, best.values.softmax(dim=-1))

    def _mode(self, chosen: Tensor) -> Tensor:
        chosen = chosen.reshape(chosen.shape[0], -1)
        counts = F.one_hot(chosen, self._votes.shape[1]).cpu()
        if self._mask is not None and self._mask.shape == chosen.shape:
            counts = counts * self._mask.cpu()[..., None]
        return counts.sum(1).argmax(1)

    def votes(self) -> Tensor:
        return self._votes / self._votes.sum(1, keepdim=True).clamp(min=1)


def _leading(stack: ExpertStack, rank: int) -> list[Tensor]:
    """Return the first right singular vectors of every task."""
    return [part[:, :rank] for part in torch.split(stack.right, list(stack.ranks), dim=1)]
