"""Forgetting in a language model: what a new skill costs of what the model knew, and how much of it WiSE-FT gives back.

    python -m benchmarks.forgetting --base STORIES [--seeds 0 1 2] [--rates 5e-4 5e-5] [--quick] [--json FILE]

stories15M learns one skill of `benchmarks.zoo.language_skills` after another, with all weights:

- the base learns `questions`; what it knew is measured on stories that it wrote itself, by the mean log-probability of
  a token (less the logarithm of the perplexity), which any other model is expected to lower;
- that fine-tune learns `sources`; what it knew is the share of held-out `questions` that it answers right.

Both scores are taken along the training and, after it, along the straight line from the weights before to those after
(WiSE-FT, `mg.tuning.forgetting.forgetting_path`). Scores of the new skill are shares of its held-out examples. A seed
is another stretch of the training examples. A run that the JSON file holds already is kept. About four minutes of
processor time for each seed and rate.

Stored in `results`: `stories` (how many), `held_out` (examples of each skill), and `runs`, one for every seed, rate
and stage, with `seed`, `rate`, `learns`, `knew`, `training` (by steps) and `path` (by position), rows of `at`, `kept`
and `learned`, and `take`, the position that `forgetting_path` proposes.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.language_texts import perplexity
from benchmarks.machine import describe
from benchmarks.records import record
from benchmarks.zoo.cards import add_locations
from benchmarks.zoo.language_skills import HELD_OUT, Skill, load_skill
from benchmarks.zoo.stories_skills import Schedule, examine, fit
from merganser.errors import require
from merganser.tuning.forgetting import forgetting_path

STORIES = "stories"
#: What is learned, and by what the loss of earlier knowledge is measured, one after the other.
STAGES = (("questions", STORIES), ("sources", "questions"))
#: Scores along the training, and along the line.
GLANCES, POINTS = 8, 11
Score = Callable[[Any], float]


@dataclass(frozen=True)
class Setting:
    """The base, the skills, and how many stories and held-out examples there are to score on."""

    base: Path
    skills: Mapping[str, Skill]
    stories: int
    held_out: int
    schedule: Schedule

    def load(self) -> Any:
        transformers = require("transformers", "hf")
        return transformers.AutoModelForCausalLM.from_pretrained(self.base, dtype=torch.float32).eval()

    def tokenizer(self) -> Any:
        return require("transformers", "hf").AutoTokenizer.from_pretrained(self.base)

    def scores(self) -> dict[str, Score]:
        """Return what models are scored on: log-probability of a story's tokens, right answers of a skill."""
        tokenizer = self.tokenizer()
        written = write_stories(self.load(), tokenizer, self.stories)
        return {
            STORIES: lambda model: -math.log(perplexity(model, tokenizer, written)[0]),
            **{name: right_answers(skill, self.base, self.held_out) for name, skill in self.skills.items()},
        }


@torch.inference_mode()
def write_stories(model: Any, tokenizer: Any, count: int, longest: int = 160) -> list[str]:
    """Return texts drawn from a language model token by token, at temperature 1."""
    torch.manual_seed(0)
    start = torch.full((count, 1), tokenizer.bos_token_id)
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": longest, "pad_token_id": tokenizer.eos_token_id}
    drawn = model.generate(start, attention_mask=torch.ones_like(start), **options)
    found: list[str] = tokenizer.batch_decode(drawn, skip_special_tokens=True)
    return found


def right_answers(skill: Skill, tokenizer: Path, count: int) -> Score:
    """Return a function that scores a model on held-out examples of a skill."""
    examiner = examine(skill, tokenizer, count)

    @torch.inference_mode()
    def score(model: Any) -> float:
        right = examiner(model, range(len(examiner)))["score"]
        return float(sum(right) / len(right))

    return score


def run_stage(model: Any, skill: Skill, seed: int, setting: Setting, kept: Score, learned: Score) -> dict[str, Any]:
    """Train a model for a skill, in place, and return the scores along the training and along the line."""
    before = copy.deepcopy(model.state_dict())
    every = setting.schedule.steps // GLANCES
    training: list[dict[str, float]] = []

    def glance(done: int) -> None:
        if done % every == 0:
            training.append({"at": done, "kept": kept(model), "learned": learned(model)})
            print(f"  {done} steps: kept {training[-1]['kept']:.3f}, learned {training[-1]['learned']:.3f}", flush=True)

    glance(0)
    fit(model, setting.tokenizer(), skill.train, seed, setting.schedule, glance)
    shell = copy.deepcopy(model)

    def scored(score: Score) -> Callable[[Mapping[str, Tensor]], float]:
        def of_weights(weights: Mapping[str, Tensor]) -> float:
            shell.load_state_dict(weights)
            return score(shell)

        return of_weights

    positions = [i / (POINTS - 1) for i in range(POINTS)]
    path = forgetting_path(before, model.state_dict(), kept=scored(kept), learned=scored(learned), positions=positions)
    rows = zip(path.positions, path.kept, path.learned, strict=True)
    return {
        "training": training,
        "path": [{"at": x, "kept": old, "learned": new} for x, old, new in rows],
        "take": path.take,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, required=True, help="stories15M, as `benchmarks.zoo.stories` writes it")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--rates", type=float, nargs="+", default=[5e-4, 5e-5], help="learning rates")
    parser.add_argument("--quick", action="store_true", help="few steps, stories and examples")
    parser.add_argument("--json", type=Path)
    add_locations(parser)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    skills = {name: load_skill(name, options.data) for name, _ in STAGES}
    stories, held_out, schedule = (4, 20, Schedule(steps=8)) if options.quick else (24, HELD_OUT, Schedule())
    setting = Setting(options.base.resolve(), skills, stories, held_out, schedule)
    results: dict[str, Any] = {
        "stories": stories,
        "held_out": {name: min(held_out, len(skill.held_out)) for name, skill in skills.items()},
        "runs": [],
    }
    if options.json and options.json.exists():
        stored = json.loads(options.json.read_text())["results"]
        results["runs"] = stored["runs"] if {**stored, "runs": []} == results else []
    known = {(run["seed"], run["rate"]) for run in results["runs"]}
    wanted = list(product(options.seeds, options.rates))
    print(describe())
    scores = setting.scores() if set(wanted) - known else {}
    for seed, rate in wanted:
        model, chosen = setting.load(), replace(setting, schedule=replace(schedule, rate=rate))
        for learns, knew in STAGES if (seed, rate) not in known else ():
            print(f"seed {seed}, rate {rate:g}: {learns} after {knew}", flush=True)
            found = run_stage(model, skills[learns], seed, chosen, scores[knew], scores[learns])
            results["runs"].append({"seed": seed, "rate": rate, "learns": learns, "knew": knew, **found})
        record(options.json, results, sorted({run["seed"] for run in results["runs"]}), added=True)


if __name__ == "__main__":
    main()
