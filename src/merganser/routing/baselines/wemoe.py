"""WeMoE: MLPs whose experts are mixed by small trained gates."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from merganser.errors import InputError, one_of
from merganser.library.library import Library
from merganser.modules.activations import Pooling, layer_of, linear_layers, pool
from merganser.modules.inputs import Inputs
from merganser.modules.naming import adopt
from merganser.routing.baselines.gated import GatedBaseline, Gates
from merganser.routing.composition import Composition
from merganser.routing.gating import stack_experts
from merganser.routing.heads import HeadLike, HeadScore
from merganser.routing.models import Features


class WeMoE(GatedBaseline):
    """Task arithmetic, with the experts of the MLPs mixed by small trained gates (WeMoE).

    In the MLPs, W = W₀ + Σ_t g_t(z) Δ_t with one gate per block: g is a two-layer perceptron of the block's pooled
    input whose last bias starts at λ, so that it starts as task arithmetic. `fit` adapts the gates to unlabelled
    batches of the tasks by lowering the entropy of the heads' answers. Without a task, the head that most blocks' gates
    vote for answers: each votes for the task with its largest coefficient, and the mean coefficient decides a draw.

    Args:
        module: The network. It must hold the base's weights.
        library: The experts.
        heads: The classification head of every expert, by its name.
        layers: The linear layers to gate; by default those with unequal sides.
        scale: λ.
        seed: Seed of the gates' first layer.
        features: Turns the module's output and inputs into what the heads read, shape (samples, width). Needed
            unless the output itself has this shape.
        pooling: How the tokens of a block's input become one vector.
        score: How answers of different heads are compared: `"logit"`, `"probability"` or `"posterior"`.

    Example:
        >>> model = mg.routing.WeMoE(encoder, library, heads, layers=["0", "2"])
        >>> model = model.fit({"math": [images], "code": [images]}, steps=2)
    """

    def __init__(
        self,
        module: nn.Module,
        library: Library,
        heads: Mapping[str, HeadLike],
        *,
        layers: Sequence[str] | None = None,
        scale: float = 0.3,
        seed: int = 0,
        features: Features | None = None,
        pooling: Pooling = "mean",
        score: HeadScore = "logit",
    ) -> None:
        one_of("pooling", pooling, Pooling)
        super().__init__(module, library, heads, features=features, score=score)
        linears = linear_layers(module)
        if layers is None:
            chosen = [name for name, part in linears.items() if part.in_features != part.out_features]
        else:
            chosen = [layer_of(name, linears) for name in layers]
        self.chosen, self.scale = chosen, scale
        self.derive()
        if not self.stacks:
            raise InputError("no layer for WeMoE to gate; name the linear layers of the MLPs")
        self.blocks = {layer: _block(layer) for layer in self.stacks}
        first: dict[str, str] = {}
        for layer, block in self.blocks.items():
            first.setdefault(block, layer)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.gates = {block: _gate(linears[layer], len(library), scale) for block, layer in first.items()}
        self.gating = nn.Module()  # where torch finds the gates
        for block, gate in self.gates.items():
            adopt(self.gating, block, gate)
        self.pooling: Pooling = pooling

    def derive(self) -> None:
        self.stacks = stack_experts(self.library, self.module, self.chosen)
        self.rest = self.ungated()

    def ungated(self) -> Composition:
        return self.averaged(self.scale, apart_from=self.stacks)

    def open_gates(self, inputs: Inputs) -> Gates:
        return _BlockGates(self.blocks, self.gates, self.pooling, inputs.mask)

    def fit(self, batches: Mapping[str, Sequence[Any]], steps: int = 50, learning_rate: float = 1e-3) -> WeMoE:
        """Train the gates; each step takes one batch of every task."""
        for task, parts in batches.items():
            self.heads.check(task)
            if not len(parts):
                raise InputError(f"no batch of {task!r} to fit the gates to")
        trained = list(self.gating.parameters())
        optimiser = torch.optim.Adam(trained, learning_rate)
        with torch.enable_grad():
            for step in range(steps):
                optimiser.zero_grad()
                for task, parts in batches.items():
                    inputs = Inputs.of(parts[step % len(parts)], self.module)
                    features = self.features(self.run(inputs)[0], inputs)
                    logits = self.heads.logits(task, features).log_softmax(dim=1)
                    entropy = -(logits.exp() * logits).sum(1).mean()
                    entropy.backward(inputs=trained)  # type: ignore[no-untyped-call]
                optimiser.step()
        return self


class _BlockGates(Gates):
    """Gates of blocks; the first layer called in a block computes its coefficients."""

    def __init__(
        self, blocks: Mapping[str, str], gates: Mapping[str, nn.Module], pooling: Pooling, mask: Tensor | None
    ) -> None:
        self._blocks, self._gates, self._pooling, self._mask = blocks, gates, pooling, mask
        self._coefficients: dict[str, Tensor] = {}

    def __call__(self, layer: str, x: Tensor) -> Tensor:
        block = self._blocks[layer]
        if block not in self._coefficients:
            self._coefficients[block] = self._gates[block](pool(x, self._pooling, self._mask))
        return self._coefficients[block]

    def votes(self) -> Tensor:
        gates = torch.stack(list(self._coefficients.values())).detach().cpu()
        chosen = torch.nn.functional.one_hot(gates.argmax(2), gates.shape[2]).sum(0)
        # Less than one vote, whatever the coefficients are.
        return (chosen + 0.5 * gates.mean(0).softmax(1)) / (len(gates) + 0.5)


def _block(layer: str) -> str:
    """Return the part of a name up to its last number; the layers of one block share a gate."""
    found = re.match(r"(.*\.|^)\d+(?=\.|$)", layer)
    return found.group(0) if found else layer


def _gate(first: nn.Linear, tasks: int, scale: float) -> nn.Module:
    width = first.in_features
    last = nn.Linear(width, tasks)
    nn.init.normal_(last.weight, std=0.01)
    nn.init.constant_(last.bias, scale)
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), last).to(first.weight)
