"""Run files over the tiny Llamas."""

from __future__ import annotations

import pytest

from support.llamas import llamas, transformers

__all__ = ["llamas", "run_file", "transformers"]

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
