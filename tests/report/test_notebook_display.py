"""Objects show themselves in notebooks as reports show them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

import merganser as mg
from merganser.analysis.landscape import Plane, Segment
from merganser.cli import build
from merganser.report.notebooks import render
from merganser.tuning.sweep import sweep
from support.world import world

PLACES = ((0.0, 0.0), (1.0, 0.0), (0.5, 1.0))


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    monkeypatch.chdir(tmp_path)
    return world(tmp_path)


def test_each_kind_says_what_matters(names: dict[str, object]) -> None:
    models, experts, base = names["models"], names["experts"], names["base"]
    merge = mg.recipes.prepare(mg.recipes.load("recipe.yml"))
    symmetry = mg.align.symmetry(base, names["images"])
    swept = sweep("recipe.yml", {"density": [0.2, 0.5]}, lambda variant, budget: 0.75)
    for shown, words in (
        (mg.open("math"), ("484 parameters", "Blocks")),
        (merge, ("ties × 6", "math")),
        (merge.plan, ("writes: 1.9 KiB in 1 file",)),
        (names["library"], ("2 experts", "energy kept")),
        (mg.interference.survey(base, experts), ("Cosine of whole task vectors", "<svg")),
        (mg.align.universe(models, symmetry), ("3 models in one universe", "cycle error 0")),
        (swept, ("density", "0.750")),
        (Segment((0.0, 0.5, 1.0), (0.1, 0.9, 0.1), (None,) * 3, 0.8, 0.8), ("barrier 0.8", "<svg")),
        (
            Plane((0.0, 1.0), (0.0, 1.0), ((0.1, 0.2), (0.3, 0.4)), ((None,) * 2,) * 2, PLACES),
            ("first at (0, 0)", "<svg"),
        ),
        (mg.evaluate.evaluate("math"), ("sound", "Checks")),
    ):
        text = shown._repr_html_()
        assert text == render(shown)
        for word in words:
            assert word in text, (type(shown).__name__, word)


def test_notebooks_and_the_terminal_show_the_same(names: dict[str, object]) -> None:
    def printed(*words: str) -> list[list[str]]:
        result = CliRunner().invoke(build(), words, catch_exceptions=False)
        return [re.split(r"  +|: ", line.strip()) for line in result.stdout.splitlines() if line]

    plan = mg.recipes.prepare(mg.recipes.load("recipe.yml")).plan
    of_plan = [cells for cells in printed("plan", "recipe.yml") if cells[0] not in ("reads", "memory")]
    for cells, html in ((of_plan, render(plan)), (printed("evaluate", "math"), render(mg.evaluate.evaluate("math")))):
        text = re.sub(r"<[^>]+>", " ", html.partition("</style>")[2])
        assert len(cells) > 2
        assert [cell for line in cells for cell in line if cell not in text] == []


def test_the_style_stays_inside(names: dict[str, object]) -> None:
    text = mg.open("math")._repr_html_()
    style = re.search(r"<style>(.*?)</style>", text, re.DOTALL)
    assert style is not None
    assert style[1].startswith(".merganser {")
    assert ":root" not in style[1]
    assert "body {" not in style[1]
    assert style[1].count("{") == style[1].count("}")


def test_labels_are_escaped(tmp_path: Path) -> None:
    import torch

    assert "<b>" not in render(mg.open({"<b>.weight": torch.zeros(2, 2)}))


def test_others_are_refused() -> None:
    with pytest.raises(TypeError, match="a dict has no report"):
        render({})
