"""The part of a page that says what a merge changed."""

import numpy as np
import pytest

from merganser.engine.changes import Change, Changes
from merganser.report.changes import combine_by_layer, fill, put_together, verdict
from merganser.report.page import Page

MOVES = np.array([[0, 0.5, 0], [0, 0, 0.5]])


def change(entries, base, made, conflicts, moves=MOVES, with_base=True):
    """A change as the engine stores it, of vectors in place of tensors."""
    gram = np.vstack([moves, made]) @ np.vstack([moves, made]).T
    sums = (entries, conflicts * entries, base @ base, (base + made) @ (base + made), *gram[np.tril_indices(len(gram))])
    parents = (1, 2) if with_base else (0, 1)
    return Change("ties", entries, parents, with_base, tuple(map(float, sums)))


MADE = {"A": np.array([0, 0.45, 0.005]), "B": np.array([0, 0.35, 0.015])}
A = change(100, np.array([3.0, 0, 0]), MADE["A"], 0.5)
B = change(300, np.array([4.0, 0, 0]), MADE["B"], 0.1)
NOTED = Changes(
    ("x/base", "x/math", "x/code"),
    {
        "layers.10.w": B,
        "layers.2.w": A,
        "layers.2.b": B,
        "steps": Change("copied", 1, (1,)),
        "h": Change("cast", 9, (1,)),
    },
)


def test_layers_are_in_natural_order_and_put_together():
    layers = combine_by_layer(NOTED)
    assert [layer.name for layer in layers] == ["layers.2", "layers.10"]
    first = layers[0]
    assert (first.entries, first.before) == (400, 5.0)
    assert first.to_base == pytest.approx(np.linalg.norm([MADE["A"], MADE["B"]]) / 5)
    away = {n: np.linalg.norm([MADE["A"] - m, MADE["B"] - m]) / 5 for n, m in zip(("math", "code"), MOVES, strict=True)}
    assert first.to_parents == pytest.approx(away)
    assert first.shares == pytest.approx({"math": 0.75, "code": 0.025})
    assert first.conflicts == pytest.approx(0.2)


def test_the_verdict_names_shares_conflicts_and_what_was_not_merged():
    said = verdict(NOTED)
    whole = np.linalg.norm([MADE["A"], MADE["B"], MADE["B"]]) / np.sqrt(9 + 16 + 16)
    for part in (
        f"{whole:.2%} of the base's norm",
        "math 0.73",
        "nothing is left of code",
        "1 copied, 1 cast",
        "5 tensors",
    ):
        assert part in said
    assert "Nothing was merged" in verdict(Changes(("a",), {"w": Change("copied", 4, (0,))}))
    ahead = np.array([1.0, 0, 0])
    grown = change(4, ahead, 0.5 * ahead, 0.0, moves=np.array([ahead]), with_base=False)
    assert "grew" in verdict(Changes(("a", "b"), {"w": grown}))


def test_a_layer_without_weights_has_no_distances_to_divide():
    empty = Change("linear", 4, (0,), False, (4.0, 0.0, 0.0, 0.0, 0.0))
    assert put_together("w", [empty], ["a"]).to_parents == {"a": 0.0}


def test_the_page_has_charts_and_numbers():
    page = Page("merge")
    fill(page, NOTED)
    html = page.render()
    assert html.count('<figure class="chart"') == 3
    assert "layers.10" in html
    assert "share of each parent" in html
