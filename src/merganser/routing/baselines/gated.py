"""Baselines with experts beside linear layers, mixed by gates."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor

from merganser.modules.inputs import Inputs
from merganser.routing.baselines.base import Baseline
from merganser.routing.composition import Composition, applied
from merganser.routing.gating import ExpertStack, gated


class Gates(ABC):
    """The gates of one forward pass."""

    @abstractmethod
    def __call__(self, layer: str, x: Tensor) -> Tensor:
        """Return the gates for the input of a layer: one row per input row, or one per sample."""

    @abstractmethod
    def votes(self) -> Tensor:
        """Return votes of shape (samples, tasks) after the pass."""


class GatedBaseline(Baseline):
    """A baseline with gated experts beside linear layers.

    `stacks` holds the experts beside each layer, `rest` the merge that is used everywhere else. A layer whose weight
    turns out to be read without a call has no gate from then on.
    """

    stacks: dict[str, ExpertStack]
    rest: Composition

    @abstractmethod
    def open_gates(self, inputs: Inputs) -> Gates:
        """Return the gates of a pass with these inputs."""

    @abstractmethod
    def ungated(self) -> Composition:
        """Return `rest`, given the layers in `stacks`."""

    def attempt(self, inputs: Inputs, task: str | None) -> tuple[Any, Tensor]:
        gates = self.open_gates(inputs)
        with applied(self.module, self.rest), gated(self.module, self.stacks, gates) as read:
            output = inputs.run(self.module)
        if not read:
            return output, gates.votes()
        self.stacks = {layer: stack for layer, stack in self.stacks.items() if layer not in read}
        self.rest = self.ungated()
        return self.attempt(inputs, task)
