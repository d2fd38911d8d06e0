"""Fine-tune one MiniLM encoder per text task from the same base: experts for multi-task merging.

    python -m benchmarks.zoo.text                      # the eight of TASKS, seed 0
    python -m benchmarks.zoo.text --count 20 --seeds 0 1 2
    python -m benchmarks.zoo.text --tasks mr trec

The head starts small and random and is trained with the upper half of the encoder, at the same rate; the embeddings and
the lower half are frozen. So the encoder has to move: the base with an expert's head keeps much less than the expert's
accuracy (`base_share` in the card), which is what merging methods need to differ. No task gets more than the same
number of training tokens. Encoder and head after one epoch are kept next to the final ones.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from benchmarks.zoo.cards import Card, add_locations, default_cache, read_card
from benchmarks.zoo.fine_tuning import CHECKPOINT, FineTuning, Material, fine_tune, guards, start_head, write_card
from benchmarks.zoo.text_layers import load_top_layers, with_states
from benchmarks.zoo.text_tasks import (
    ALL_TASKS,
    TASK_SETS,
    TASKS,
    Head,
    Task,
    accuracy,
    base_directory,
    load_encoder,
    load_task,
    pool,
)

TOKENISER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt")


@dataclass(frozen=True)
class Schedule(FineTuning):
    """Two epochs of at most `tokens` tokens; no dropout."""

    epochs: int = 2
    rate: float = 3e-4
    batch: int = 16
    tokens: int = 20_000


def expert_directory(cache: Path, task: str, seed: int = 0) -> Path:
    """An HF directory (config, tokenizer, model.safetensors) with head.safetensors; `epoch1/` inside is another."""
    return cache / "text" / task / f"seed{seed}"


def load_head(task: str, seed: int = 0, cache: Path | None = None, early: bool = False) -> dict[str, Tensor]:
    """An expert's head: `weight` classes×384 and `bias`; with `early`, as it was after one epoch."""
    directory = expert_directory(cache or default_cache(), task, seed) / ("epoch1" if early else "")
    return load_file(directory / "head.safetensors")


def save_base(cache: Path) -> Path:
    """The base encoder as an HF directory with the same tensor names as the experts."""
    directory = cache / "text" / "base"
    if not (directory / "model.safetensors").exists():
        _save_encoder(load_encoder(), directory)
    return directory


def train(task: Task, seed: int, schedule: Schedule, cache: Path) -> Card:
    """Train one expert, or finish an interrupted one, or return the card of a finished one."""
    directory = expert_directory(cache, task.name, seed)
    if card := read_card(directory, schedule):
        return card
    directory.mkdir(parents=True, exist_ok=True)
    sentences, test = with_states(task.train.within(schedule.tokens)), with_states(task.test)
    base, layers = load_top_layers(), load_top_layers()
    head = start_head(pool(base, sentences.padded(np.array([0]))).shape[1], task.classes, schedule.head_spread, seed)

    def batches(generator: torch.Generator) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        for chosen in sentences.batches(schedule.batch, generator):
            yield sentences.padded(chosen), sentences.labels[chosen]

    material = Material(
        steps=-(-len(sentences) // schedule.batch),
        batches=batches,
        features=lambda batch: pool(layers, batch),
        score=lambda: accuracy(layers, head.state_dict(), test),
    )
    history = fine_tune(
        task.name,
        layers,
        head,
        material,
        schedule,
        seed,
        directory / CHECKPOINT,
        after_first=lambda: _save_expert(layers, head.state_dict(), directory / "epoch1"),
    )
    _save_expert(layers, head.state_dict(), directory)
    scores = {
        "base_accuracy": accuracy(base, head.state_dict(), test),
        "epoch1_accuracy": history[0]["test_accuracy"],
        "test_accuracy": history[-1]["test_accuracy"],
    }
    data = {"task": task.name, "classes": task.classes, "train": len(sentences), "test": len(task.test)}
    data["train_tokens"] = int(sentences.ends[-1])
    guarded = guards(base, layers, scores["base_accuracy"], scores["test_accuracy"])
    model = f"all-MiniLM-L6-v2 on {task.name}"
    return write_card(directory, model, seed, data, schedule, material.steps, history, scores, guarded)


def _save_expert(layers: nn.Module, head: Head, directory: Path) -> None:
    encoder = load_encoder()
    encoder.load_state_dict(layers.state_dict(), strict=False)
    _save_encoder(encoder, directory)
    save_file(dict(head), directory / "head.safetensors")


def _save_encoder(encoder: Any, directory: Path) -> None:
    encoder.save_pretrained(directory)
    for name in TOKENISER_FILES:
        shutil.copyfile(base_directory() / name, directory / name)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--tasks", nargs="+", choices=ALL_TASKS, default=list(TASKS))
    chosen.add_argument("--count", type=int, choices=TASK_SETS, help="the tasks merged together, by their number")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    add_locations(parser)
    options = parser.parse_args(arguments)
    save_base(options.cache)
    for seed in options.seeds:
        for name in TASK_SETS[options.count] if options.count else options.tasks:
            card = train(load_task(name, options.data, options.cache), seed, Schedule(), options.cache)
            scores = ", ".join(f"{key} {value:.4f}" for key, value in card.scores.items())
            share = card.guards["base_share"]
            print(f"{card.model} seed {seed}: {scores}, base share {share:.2f}, {card.seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
