"""Run files over the tiny Llamas, and over a toy."""

from __future__ import annotations

import pytest
import torch
import toy_experts
from safetensors.torch import save_file

from support.llamas import llamas, transformers

__all__ = ["llamas", "run_file", "toy", "transformers"]

RUN = """
base: ./base
models: {math: ./math, code: ./code}
method: ties
space:
  weight: {low: 0, high: 1.5, per: model}
  density: {low: 0.2, high: 1.0, groups: {mlp: "*.mlp.*", rest: "*"}}
tasks:
  quiz: {kind: multiple-choice, data: ./quiz.jsonl, subset: 8, estimator: gmp-irt, c: adaptive}
objectives: [quiz]
search: {population: 5, generations: 2, seed: 1}
model: {kind: causal-lm}
"""


@pytest.fixture
def run_file(llamas, tmp_path):
    """A function that writes a run file beside the models (by absolute paths) with parts replaced."""

    def write(*replacements, text=RUN):
        for old, new in replacements:
            assert old in text, old
            text = text.replace(old, new)
        path = tmp_path / "run.yml"
        path.write_text(text.replace("./", f"{llamas}/"))
        return path

    return write


TOY = """
base: ./base.safetensors
models: {left: ./left.safetensors, right: ./right.safetensors}
method: task_arithmetic
space: {weight: {low: 0, high: 1.5, per: model}}
tasks:
  left: {kind: function, function: "toy_experts:left", items: 60, subset: 12}
  right: {kind: function, function: "toy_experts:right", items: 60, subset: 12}
objectives: [{name: mean, measures: {left: 0.5, right: 0.5}}]
search: {algorithm: ga, population: 6, generations: 2}
model: {kind: "toy_experts:build"}
"""


@pytest.fixture
def toy(tmp_path):
    """A function that writes the toy's run file beside its models, with parts replaced."""
    generator = torch.Generator().manual_seed(0)
    weights = {"base": 0.1 * torch.randn(3, 6, generator=generator), **{n: r.T for n, r in toy_experts.rules.items()}}
    for name, weight in weights.items():
        save_file({"weight": weight.contiguous(), "bias": torch.zeros(3)}, tmp_path / f"{name}.safetensors")

    def write(*replacements, name="toy.yml", text=TOY):
        for old, new in replacements:
            assert old in text, old
            text = text.replace(old, new)
        path = tmp_path / name
        path.write_text(text)
        return path

    return write
