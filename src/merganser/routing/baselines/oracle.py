"""The limit for every router."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from merganser.errors import InputError
from merganser.modules.inputs import Inputs
from merganser.routing.baselines.base import Baseline
from merganser.routing.composition import applied


class Oracle(Baseline):
    """The expert of the task, which the caller must name: an upper bound.

    Args:
        module: The network. It must hold the base's weights.
        library: The experts.
        heads: The classification head of every expert, by its name.
        features: Turns the module's output and inputs into what the heads read, shape (samples, width). Needed
            unless the output itself has this shape.
        score: How answers of different heads are compared: `"logit"`, `"probability"` or `"posterior"`.
        merge: Parameters of the method `tsv`; without effect on a single expert.

    Example:
        >>> answer = mg.routing.Oracle(encoder, library, heads).predict(images, "math")
    """

    def attempt(self, inputs: Inputs, task: str | None) -> tuple[Any, Tensor | None]:
        if task is None:
            raise InputError("the oracle needs the task: call predict(batch, task)")
        expert = self.composer.compose(frozenset([task])).materialized(self.composer.tensors)
        with applied(self.module, expert):
            output = inputs.run(self.module)
        return output, torch.tensor([[float(name == task) for name in self.library.experts]]).expand(inputs.size, -1)
