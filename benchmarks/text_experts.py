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
from torch import Tensor

from benchmarks.experts import Experts, Part, changed, floats
from benchmarks.zoo.text import Schedule, expert_directory, load_head, save_base, train
from benchmarks.zoo.text_layers import layers_from, with_states
from benchmarks.zoo.text_tasks import TASKS, Task, load_task, pool, right

#: Sentences of similar length that are encoded together.
BATCH = 64


@dataclass(frozen=True)
class TextExperts(Experts[Task]):
    """Encoders of sentences; the frozen lower half has been run on the sentences of every task."""

    def answers(self, weights: Mapping[str, Tensor], names: Sequence[str], part: Part = "test") -> dict[str, Tensor]:
        layers = layers_from(weights)
        return {name: right(layers, self.heads[name], getattr(self.tasks[name], part)) for name in names}

    @torch.no_grad()
    def ask(self, weights: Mapping[str, Tensor], items: Mapping[str, Sequence[int]], part: Part) -> dict[str, Tensor]:
        layers = layers_from(weights)
        found = {}
        for name, chosen in items.items():
            sentences, head = getattr(self.tasks[name], part), self.heads[name]
            places = np.argsort(sentences.lengths[list(chosen)], kind="stable")
            found[name] = torch.zeros(len(chosen), dtype=torch.bool)
            for own in np.split(places, range(BATCH, len(places), BATCH)):
                asked = np.array(chosen)[own]
                logits = pool(layers, sentences.padded(asked)) @ head["weight"].T + head["bias"]
                found[name][own] = logits.argmax(1) == sentences.labels[asked]
        return found


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
        {name: load_head(name, seed, cache, early) for name in names},
        {name: load_sentences(name, data, cache, test, validation) for name in names},
    )
