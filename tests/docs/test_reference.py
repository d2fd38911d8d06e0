"""The generated reference covers every method."""

from __future__ import annotations

from pathlib import Path

import yaml

from merganser.methods.registry import registry

WHEN = yaml.safe_load((Path(__file__).parents[2] / "docs/tools/when_to_use.yml").read_text(encoding="utf-8"))


def test_the_reference_says_when_to_use_each_method() -> None:
    assert list(WHEN) == sorted(registry())
    assert all(sentence.endswith(".") for sentence in WHEN.values())
