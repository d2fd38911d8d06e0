"""Fine-tune one MiniLM encoder per text task from the same base: experts for multi-task merging.

    python -m benchmarks.zoo.text                      # all eight
    python -m benchmarks.zoo.text --tasks mr trec

First a head is fitted to the untouched encoder's features (a linear probe), then the head stays as it is and
the encoder is trained, embeddings frozen: the thesis' setting, where frozen zero-shot heads make the loss a
function of the encoder alone. So the probe's accuracy is what the base scores on the task, and Δ = expert − base
carries all that was learned. No task gets more than the same number of training tokens. The encoder after one
epoch is kept next to the final one.

An expert takes two minutes of processor time on one thread (2-core server processor), all eight a quarter of an hour.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from benchmarks.records import command
from benchmarks.zoo.cards import Card, add_locations, default_cache, read_card
from benchmarks.zoo.text_tasks import (
    TASKS,
    Sentences,
    Task,
    accuracy,
    base_directory,
    encode,
    load_encoder,
    load_task,
    pool,
)
from benchmarks.zoo.training import Stopwatch, save_checkpoint, set_rate, triangle

TOKENISER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt")


@dataclass(frozen=True)
class Schedule:
    """AdamW on the encoder without dropout; the rate rises over `warmup` of the steps, then falls to zero."""

    epochs: int = 2
    tokens: int = 45_000
    rate: float = 1e-4
    batch: int = 32
    warmup: float = 0.1
    decay: float = 0.01
    probe_decay: float = 1e-3


def expert_directory(cache: Path, task: str, seed: int = 0) -> Path:
    """An HF directory (config, tokenizer, model.safetensors) with head.safetensors; `epoch1/` inside is another."""
    return cache / "text" / task / f"seed{seed}"


def load_head(task: str, seed: int = 0, cache: Path | None = None) -> dict[str, Tensor]:
    """An expert's head: `weight` classes×384 and `bias`."""
    return load_file(expert_directory(cache or default_cache(), task, seed) / "head.safetensors")


def save_base(cache: Path) -> Path:
    """The base encoder as an HF directory with the same tensor names as the experts."""
    directory = cache / "text" / "base"
    if not (directory / "model.safetensors").exists():
        _save_encoder(load_encoder(), directory)
    return directory


def fit_head(features: Tensor, labels: Tensor, classes: int, decay: float) -> dict[str, Tensor]:
    """Multinomial logistic regression with an L2 penalty, by L-BFGS from zero: no randomness."""
    weight = torch.zeros(classes, features.shape[1], requires_grad=True)
    bias = torch.zeros(classes, requires_grad=True)
    optimiser = torch.optim.LBFGS([weight, bias], max_iter=300, line_search_fn="strong_wolfe")

    def objective() -> Tensor:
        optimiser.zero_grad()
        loss = F.cross_entropy(features @ weight.T + bias, labels) + decay * weight.square().sum()
        loss.backward()
        return loss

    optimiser.step(objective)
    return {"weight": weight.detach(), "bias": bias.detach()}


def train(task: Task, seed: int, schedule: Schedule, cache: Path) -> Card:
    """Train one expert, or finish an interrupted one, or return the card of a finished one."""
    directory = expert_directory(cache, task.name, seed)
    if card := read_card(directory):
        return card
    directory.mkdir(parents=True, exist_ok=True)
    checkpoint = directory / "checkpoint.pt"
    sentences = task.train.within(schedule.tokens)
    encoder = load_encoder()
    trained = [p for name, p in encoder.named_parameters() if name.startswith("encoder.")]
    encoder.requires_grad_(False)
    for parameter in trained:
        parameter.requires_grad_(True)
    optimiser = torch.optim.AdamW(trained, schedule.rate, weight_decay=schedule.decay)

    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        encoder.load_state_dict(state["encoder"])
        optimiser.load_state_dict(state["optimiser"])
        history: list[dict[str, float]] = state["history"]
        head = load_file(directory / "head.safetensors")
    else:
        watch = Stopwatch()
        head = fit_head(encode(encoder, sentences), sentences.labels, task.classes, schedule.probe_decay)
        spent = watch.read()
        save_file(head, directory / "head.safetensors")
        history = [{"test_accuracy": accuracy(encoder, head, task), **spent}]
        print(f"{task.name}: the base with this head {history[0]['test_accuracy']:.4f}", flush=True)

    for epoch in range(len(history), schedule.epochs + 1):
        watch = Stopwatch()
        loss = _epoch(encoder, head, optimiser, trained, sentences, schedule, epoch, seed)
        spent = watch.read()
        score = accuracy(encoder, head, task)
        history.append({"loss": loss, "test_accuracy": score, **spent})
        print(f"{task.name} seed {seed} epoch {epoch}: {score:.4f} in {spent['seconds']:.0f} s", flush=True)
        if epoch == 1:
            _save_encoder(encoder, directory / "epoch1")
        save_checkpoint(checkpoint, encoder=encoder.state_dict(), optimiser=optimiser.state_dict(), history=history)

    _save_encoder(encoder, directory)
    card = Card(
        model=f"all-MiniLM-L6-v2 on {task.name}",
        command=command(),
        seed=seed,
        data={
            "task": task.name,
            "classes": task.classes,
            "train": len(sentences),
            "train_tokens": int(sentences.ends[-1]),
            "test": len(task.test),
        },
        epochs=schedule.epochs,
        training=asdict(schedule),
        scores={
            "base_accuracy": history[0]["test_accuracy"],
            "epoch1_accuracy": history[1]["test_accuracy"],
            "test_accuracy": history[-1]["test_accuracy"],
        },
        history=history,
        seconds=sum(epoch["seconds"] for epoch in history),
    )
    card.write(directory)
    checkpoint.unlink(missing_ok=True)
    return card


def _epoch(
    encoder: nn.Module,
    head: dict[str, Tensor],
    optimiser: torch.optim.Optimizer,
    trained: list[nn.Parameter],
    sentences: Sentences,
    schedule: Schedule,
    epoch: int,
    seed: int,
) -> float:
    """One epoch (counted from 1); its randomness depends on (seed, epoch) only, so a resumed run equals a whole one."""
    generator = torch.Generator().manual_seed(1000 * seed + epoch)
    steps = -(-len(sentences) // schedule.batch)
    losses = []
    for step, chosen in enumerate(sentences.batches(schedule.batch, generator)):
        progress = ((epoch - 1) * steps + step + 1) / (steps * schedule.epochs)
        set_rate(optimiser, schedule.rate * triangle(progress, schedule.warmup))
        features = pool(encoder, sentences.padded(chosen))
        loss = F.cross_entropy(features @ head["weight"].T + head["bias"], sentences.labels[chosen])
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimiser.step()
        losses.append(loss.item())
    return sum(losses) / len(losses)


def _save_encoder(encoder: Any, directory: Path) -> None:
    encoder.save_pretrained(directory)
    for name in TOKENISER_FILES:
        shutil.copyfile(base_directory() / name, directory / name)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--epochs", type=int, default=Schedule.epochs)
    parser.add_argument("--tokens", type=int, default=Schedule.tokens, help="training tokens of each task")
    add_locations(parser)
    options = parser.parse_args(arguments)
    save_base(options.cache)
    schedule = Schedule(epochs=options.epochs, tokens=options.tokens)
    for seed in options.seeds:
        for name in options.tasks:
            card = train(load_task(name, options.data, options.cache), seed, schedule, options.cache)
            scores = ", ".join(f"{key} {value:.4f}" for key, value in card.scores.items())
            print(f"{card.model} seed {seed}: {scores}, {card.seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
