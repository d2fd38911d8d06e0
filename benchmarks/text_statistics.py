"""Gram matrices of text experts on a few unlabelled sentences, for methods that merge with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn

import merganser as mg
from benchmarks import text_experts
from benchmarks.text_experts import TextExperts
from merganser.tuning.statistics import Statistics

#: Validation sentences of each task, whose labels are not used.
SENTENCES = 32
Given = dict[str, dict[str, Statistics]]


class Outputs(nn.Module):
    """An encoder that returns its last hidden states alone, under the same names of weights."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self._run: Any = type(encoder).forward
        for name, child in encoder.named_children():
            self.add_module(name, child)

    def forward(self, **inputs: Tensor) -> Tensor:
        found: Tensor = self._run(self, **inputs).last_hidden_state
        return found


def grams(experts: TextExperts, names: Sequence[str]) -> Given:
    """Gram matrices of the inputs of every expert's layers, on sentences of its own task."""
    data = sentences(experts, names)
    found = {
        name: mg.tuning.linear_grams(
            Outputs(text_experts.layers_from(experts.whole(experts.experts[name]))), data[name]
        )
        for name in names
    }
    return {"gram": found}


def merged_grams(experts: TextExperts, names: Sequence[str]) -> Given:
    """Gram matrices in the merged encoder, block after block, as RegMean++ takes them."""
    models = {name: experts.whole(experts.experts[name]) for name in names}
    module = Outputs(text_experts.layers_from(experts.base))
    _, found = mg.tuning.regmean_pp(models, module, sentences(experts, names))
    return {"gram": found}


def sentences(experts: TextExperts, names: Sequence[str]) -> Mapping[str, list[dict[str, Tensor]]]:
    """The first sentences of every task, one a batch: padding is no input of a layer."""
    found = {}
    for name in names:
        part = experts.tasks[name].validation
        found[name] = [part.padded(np.array([index])) for index in range(min(SENTENCES, len(part)))]
    return found
