"""The answer of every model over a library."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from merganser.errors import InputError
from merganser.routing.choices import Routing


class Prediction(NamedTuple):
    """The answer to a batch, with heads or without.

    Attributes:
        logits: Scores of the heads, shape (samples, columns), −inf for heads that were not used; without heads the
            module's output.
        tasks: The task of each sample: that of the winning head, or without heads the one with the largest weight.
        sets: The experts that were merged for each sample.
        routing: The router's decision: weights of all experts, in the library's order, and which samples fell back.
        output: The module's output, which the heads read.
        columns: The task and the class of every column of `logits`.
        chosen: The winning column of each sample.

    Example:
        >>> answer = mg.routing.AdaptiveModel(encoder, library, heads)(images)
        >>> answer.weights.shape
        torch.Size([12, 2])
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
        """Weights of the experts, shape (samples, experts)."""
        return self.routing.weights

    @property
    def classes(self) -> Tensor:
        """Class of each sample, an index into the classes of its task's head."""
        return torch.tensor([self.columns[column][1] for column in self._winners().tolist()])

    @property
    def scores(self) -> Tensor:
        """Winning score of each sample."""
        table: Tensor = self.logits
        return table.gather(1, self._winners()[:, None]).squeeze(1)

    def _winners(self) -> Tensor:
        if self.chosen is None:
            raise InputError("the model has no heads and so no classes; read `logits`, the module's output")
        return self.chosen
