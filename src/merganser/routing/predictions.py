"""What every model over a library answers."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from merganser.errors import InputError
from merganser.routing.routers import Routing


class Prediction(NamedTuple):
    """The answer to a batch, with heads or without.

    Attributes:
        logits: With heads their scores, samples × `columns`, −inf for heads that were not asked; without them the
            module's output.
        tasks: The task of each sample: the one whose head won, or without heads the one of the largest weight.
        sets: The experts that were merged for each sample.
        routing: What the router said: the weights of all experts, in the library's order, and who fell back.
        output: The module's output, which the heads read.
        columns: The task and the class of every column of `logits`.
        chosen: The winning column of each sample.
    """

    logits: Any
    tasks: tuple[str, ...]
    sets: tuple[frozenset[str], ...]
    routing: Routing
    output: Any = None
    columns: tuple[tuple[str, int], ...] = ()
    chosen: Tensor | None = None

    @property
    def weights(self) -> Tensor:
        """The router's weights, samples × experts."""
        return self.routing.weights

    @property
    def classes(self) -> Tensor:
        """The class of each sample, as its task's head counts them."""
        return torch.tensor([self.columns[column][1] for column in self._winners().tolist()])

    @property
    def scores(self) -> Tensor:
        """The winning score of each sample."""
        table: Tensor = self.logits
        return table.gather(1, self._winners()[:, None]).squeeze(1)

    def _winners(self) -> Tensor:
        if self.chosen is None:
            raise InputError("the model has no heads, so there are no classes; `logits` is the module's output")
        return self.chosen
