"""The limit for every router."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from merganser.errors import InputError
from merganser.modules.inputs import Inputs
from merganser.routing.baselines.base import Baseline
from merganser.routing.composition import applied
from merganser.routing.heads import Prediction


class Oracle(Baseline):
    """The expert of the task, which has to be told."""

    def run(self, inputs: Inputs) -> NoReturn:
        raise InputError("the oracle has to be told the task: predict(batch, task)")

    @torch.no_grad()
    def predict(self, batch: Any, task: str | None = None) -> Prediction:
        self.heads.check(task)
        inputs = Inputs.of(batch, self.module)
        if task is None:
            self.run(inputs)
        expert = self.composer.compose(frozenset([task])).materialized(self.composer.tensors)
        with applied(self.module, expert):
            output = inputs.run(self.module)
        votes = torch.tensor([[float(name == task) for name in self.library.experts]]).expand(inputs.size, -1)
        return self.answer(inputs, output, votes, task)
