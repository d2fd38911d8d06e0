"""Fine-tunes of stories15M, one per skill of `language_skills`: a language model that takes a minute to train.

    python -m benchmarks.zoo.stories_skills --base STORIES --skills questions sources

All weights are trained, with the loss on the tokens of the right option after the prompt. The base is the directory
that `benchmarks.zoo.stories` writes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.records import command
from benchmarks.zoo.cards import Card, add_locations, read_card
from benchmarks.zoo.language_skills import SKILLS, Example, Skill, load_skill
from benchmarks.zoo.training import Stopwatch, set_rate, triangle
from merganser.errors import require
from merganser.evaluate.examiners import MultipleChoice

NAME = "stories15M"


@dataclass(frozen=True)
class Schedule:
    """AdamW on all weights. At ten times the rate, a fine-tune forgets its language (`benchmarks.forgetting`)."""

    steps: int = 120
    rate: float = 5e-5
    batch: int = 16
    warmup: float = 0.1


def examine(skill: Skill, tokenizer: Path, count: int | None = None) -> MultipleChoice:
    """The held-out examples of a skill as multiple choice."""
    records = [
        {"question": each.prompt, "options": list(each.options), "answer": each.answer}
        for each in skill.held_out[:count]
    ]
    return MultipleChoice(records, str(tokenizer), prompt="{question}", normalize=False)


def train(skill: Skill, base: Path, cache: Path, seed: int, schedule: Schedule) -> Path:
    """The directory of the fine-tuned model, trained unless it is there."""
    directory = cache / "stories" / skill.name / f"seed{seed}"
    if read_card(directory, schedule):
        return directory
    transformers = require("transformers", "hf")
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    examiner = examine(skill, base)
    before = _score(model, examiner)
    watch = Stopwatch()
    losses = fit(model, tokenizer, skill.train, seed, schedule)
    trained = watch.read()
    after = _score(model, examiner)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    own = f"{skill.name}_right"
    Card(
        model=f"{NAME} fine-tuned for {skill.name}",
        command=command(),
        seed=seed,
        data={"skill": skill.name, "examples": schedule.steps * schedule.batch, "scored": len(examiner)},
        epochs=1,
        steps=schedule.steps,
        training=asdict(schedule),
        scores={own: after},
        history=[{"loss": sum(losses[-20:]) / len(losses[-20:]), **trained}],
        seconds=trained["seconds"],
        guards={"base": before, "points_gained": 100 * (after - before)},
    ).write(directory)
    print(f"{skill.name}: {before:.3f} before, {after:.3f} after, {trained}", flush=True)
    return directory


def fit(
    model: Any,
    tokenizer: Any,
    examples: Sequence[Example],
    seed: int,
    schedule: Schedule,
    on_step: Callable[[int], None] = lambda done: None,
) -> list[float]:
    """Train a language model for a skill, in place.

    Args:
        model: A causal language model of transformers.
        tokenizer: Its tokenizer.
        examples: Shuffled examples, of which every seed takes another stretch.
        seed: Which stretch.
        schedule: Steps and rate.
        on_step: Called after each step with the number of steps done.

    Returns:
        The loss of every step.
    """
    model.train()
    optimiser = torch.optim.AdamW(model.parameters(), schedule.rate, weight_decay=0.0)
    losses = []
    for step in range(schedule.steps):
        set_rate(optimiser, schedule.rate * triangle((step + 1) / schedule.steps, schedule.warmup))
        first = (seed * schedule.steps + step) * schedule.batch
        chosen = [examples[(first + i) % len(examples)] for i in range(schedule.batch)]
        prompts = tokenizer([each.prompt for each in chosen])["input_ids"]
        wholes = tokenizer([f"{each.prompt} {each.options[each.answer]}" for each in chosen])["input_ids"]
        rows = [torch.tensor(whole) for whole in wholes]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        places = torch.arange(ids.shape[1])
        lengths, starts = (torch.tensor([len(row) for row in group])[:, None] for group in (wholes, prompts))
        hidden = model.model(input_ids=ids, attention_mask=(places < lengths).long()).last_hidden_state
        # The state before each token of an option says it.
        asked = (places >= starts - 1) & (places < lengths - 1)
        logits = model.lm_head(hidden[asked])
        loss = F.cross_entropy(logits, ids[:, 1:][asked[:, :-1]])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
        on_step(step + 1)
    return losses


@torch.inference_mode()
def _score(model: Any, examiner: MultipleChoice) -> float:
    model.eval()
    right = examiner(model, range(len(examiner)))["score"]
    return sum(right) / len(right)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, required=True, help="stories15M, as `benchmarks.zoo.stories` writes it")
    parser.add_argument("--skills", nargs="+", choices=SKILLS, default=["questions", "sources"])
    parser.add_argument("--seed", type=int, default=0)
    add_locations(parser)
    options = parser.parse_args(arguments)
    for name in options.skills:
        train(load_skill(name, options.data), options.base, options.cache, options.seed, Schedule())


if __name__ == "__main__":
    main()
