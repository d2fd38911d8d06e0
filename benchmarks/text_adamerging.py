"""AdaMerging of text experts: entropy of each task's head on unlabelled sentences, also over TSV-Merge's parts."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from benchmarks.text_experts import State, TextExperts
from benchmarks.zoo.text_tasks import load_encoder, pool
from merganser.tuning.adamerging import AdaMerging, learn_coefficients

STEPS = 20
#: Ten times the paper's, for a twenty-fifth of its steps.
LEARNING_RATE = 1e-2
#: Unlabelled validation sentences of each task, and how many of them a step sees.
SENTENCES, BATCH = 80, 8


class Pooled(nn.Module):
    """An encoder whose output is the mean of its last hidden states."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return pool(self.encoder, {"input_ids": input_ids, "attention_mask": attention_mask})


def adamerged(
    experts: TextExperts, parts: Mapping[str, State], *, init: float, steps: int = STEPS
) -> tuple[AdaMerging, State]:
    """Tensor-wise coefficients of each task's `parts`, learned without labels, and the merged weights."""
    generator = torch.Generator().manual_seed(0)
    inputs = {}
    for name in parts:
        sentences = experts.tasks[name].validation.slice(0, SENTENCES)
        inputs[name] = [sentences.padded(chosen) for chosen in sentences.batches(BATCH, generator)]
    result = learn_coefficients(
        Pooled(load_encoder()),
        prefixed(experts.base),
        {name: prefixed(part) for name, part in parts.items()},
        inputs,
        wise="tensor",
        init=init,
        learning_rate=LEARNING_RATE,
        steps=steps,
        heads={name: linear(experts.heads[name]) for name in parts},
    )
    merged = result.merge(prefixed(experts.base), {name: prefixed(part) for name, part in parts.items()})
    return result, {name.removeprefix("encoder."): tensor for name, tensor in merged.items()}


def prefixed(state: Mapping[str, Tensor]) -> State:
    """Under the names of `Pooled`."""
    return {f"encoder.{name}": tensor for name, tensor in state.items()}


def linear(head: Mapping[str, Tensor]) -> nn.Module:
    """A head as a module."""
    module = nn.Linear(head["weight"].shape[1], head["weight"].shape[0])
    module.load_state_dict(dict(head))
    return module.requires_grad_(False)
