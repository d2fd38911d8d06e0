"""MiniLM text experts in memory (see `benchmarks.experts`); embeddings and lower layers were frozen in training.

Test sentences are the first `test` of the shuffled test file,
validation sentences the first `validation` of those held out of the training file; the two are disjoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache as memoise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.experts import Classifiers, Part, changed, floats
from benchmarks.zoo.text import Schedule, expert_directory, load_head, save_base, train
from benchmarks.zoo.text_layers import layers_from, with_states
from benchmarks.zoo.text_tasks import TASKS, Task, load_task, pool

#: Sentences of similar length that are encoded together.
BATCH = 64


@dataclass(frozen=True)
class TextExperts(Classifiers[Task]):
    """Encoders of sentences; the frozen lower half has been run on the sentences of every task."""

    def backbone(self, weights: Mapping[str, Tensor]) -> nn.Module:
        return layers_from(weights)

    def logits(self, backbone: nn.Module, name: str, items: Sequence[int], part: Part) -> Tensor:
        sentences, head, chosen = getattr(self.tasks[name], part), self.heads[name], np.array(items)
        order = np.argsort(sentences.lengths[chosen], kind="stable")
        found = [
            pool(backbone, sentences.padded(chosen[own])) @ head["weight"].T + head["bias"]
            for own in np.split(order, range(BATCH, len(order), BATCH))
        ]
        return torch.cat(found)[torch.from_numpy(np.argsort(order))]


@memoise
def load_sentences(name: str, data: Path, cache: Path, test: int, validation: int) -> Task:
    """A task whose test and validation sentences, so many of them, are ready for the trained layers."""
    task = load_task(name, data, cache)
    return replace(
        task,
        test=with_states(task.test.slice(0, test)),
        validation=with_states(task.validation.slice(0, validation)) if validation else task.validation.slice(0, 0),
    )


def load_experts(
    cache: Path,
    data: Path,
    names: Sequence[str] = TASKS,
    *,
    test: int,
    validation: int,
    seed: int = 0,
    early: bool = False,
) -> TextExperts:
    """The experts of the zoo, trained if it lacks them; with `early`, as they were after one epoch."""
    base = floats(save_base(cache))
    for name in names:
        train(load_task(name, data, cache), seed, Schedule(), cache)
    whole = {name: floats(expert_directory(cache, name, seed) / ("epoch1" if early else "")) for name in names}
    moved = changed(base, whole.values())
    return TextExperts(
        base,
        {name: {tensor: expert[tensor] for tensor in moved} for name, expert in whole.items()},
        {name: load_sentences(name, data, cache, test, validation) for name in names},
        {name: load_head(name, seed, cache, early) for name in names},
    )
