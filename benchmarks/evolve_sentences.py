"""MiniLM text experts and the test sentences of their tasks, each answered through its own task's head."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.evolve_answers import METHOD, Setting
from benchmarks.zoo.text import Schedule, expert_directory, load_head, save_base, train
from benchmarks.zoo.text_tasks import TASKS, Sentences, encode, load_encoder, load_task
from merganser.evolve.fitness import LiveMerge

BATCH = 64


@dataclass(frozen=True)
class SentenceExam:
    """The experts of a setting; right is the label of the largest logit."""

    setting: Setting
    cache: Path
    parts: Mapping[str, Sentences]
    heads: Mapping[str, Mapping[str, Tensor]]

    @property
    def strata(self) -> tuple[str, ...]:
        return tuple(name for name, sentences in self.parts.items() for _ in range(len(sentences)))

    def asked(self, model: nn.Module, items: Sequence[int]) -> np.ndarray:
        answers = np.empty(len(items))
        for start, name in self._starts():
            sentences = self.parts[name]
            places = [p for p, item in enumerate(items) if start <= item < start + len(sentences)]
            if places:
                chosen = _chosen(sentences, [items[p] - start for p in places])
                answers[places] = self._right(name, encode(model, chosen, BATCH), chosen)
        return answers

    def answers(self, model: nn.Module) -> np.ndarray:
        return np.concatenate([self._right(n, encode(model, s, BATCH), s) for n, s in self.parts.items()])

    def features(self, model: nn.Module) -> np.ndarray:
        return torch.cat([encode(model, sentences, BATCH) for sentences in self.parts.values()]).numpy()

    def live(self) -> LiveMerge:
        base = self.cache / "text" / "base"
        template = {
            "method": METHOD,
            "base": str(base),
            "models": [{"path": str(expert_directory(self.cache, name))} for name in self.setting.experts],
        }
        return LiveMerge(load_encoder(base), template, self.setting.space)

    def others(self) -> Iterator[tuple[str, nn.Module]]:
        """The base, every expert of the zoo, and every expert after one epoch."""
        found = {"base": self.cache / "text" / "base"}
        for name in TASKS:
            directory = expert_directory(self.cache, name)
            found |= {name: directory, f"{name} early": directory / "epoch1"}
        for name, path in found.items():
            if (path / "model.safetensors").exists():
                yield name, load_encoder(path)

    def _starts(self) -> Iterator[tuple[int, str]]:
        start = 0
        for name, sentences in self.parts.items():
            yield start, name
            start += len(sentences)

    def _right(self, name: str, features: Tensor, sentences: Sentences) -> np.ndarray:
        logits = features @ self.heads[name]["weight"].T + self.heads[name]["bias"]
        return (logits.argmax(1) == sentences.labels).double().numpy()


def _chosen(sentences: Sentences, indices: Sequence[int]) -> Sentences:
    parts = [sentences.slice(i, i + 1) for i in indices]
    tokens = np.concatenate([part.tokens for part in parts])
    return Sentences(tokens, np.cumsum([len(p.tokens) for p in parts]), torch.cat([part.labels for part in parts]))


def load_sentences(setting: Setting, cache: Path, data: Path) -> SentenceExam:
    """The items; experts that the zoo lacks are trained."""
    save_base(cache)
    tasks = {name: load_task(name, data, cache) for name in setting.experts}
    for task in tasks.values():
        train(task, 0, Schedule(), cache)
    parts = {name: task.test.slice(0, setting.items) for name, task in tasks.items()}
    return SentenceExam(setting, cache, parts, {name: load_head(name, 0, cache) for name in setting.experts})
