"""The part of a page that says what a merge changed."""

import pytest

from merganser.engine.changes import Change, Changes
from merganser.report.changes import by_layer, fill, put_together, verdict
from merganser.report.page import Page

A = Change("ties", 100, (1, 2), 100, 3.0, 3.0, 0.3, (0.6, 0.8), (0.9, 0.01), 0.5)
B = Change("ties", 300, (1, 2), 300, 4.0, 4.0, 0.4, (0.8, 0.6), (0.7, 0.03), 0.1)
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
    layers = by_layer(NOTED)
    assert [layer.name for layer in layers] == ["layers.2", "layers.10"]
    first = layers[0]
    assert (first.entries, first.before) == (400, 5.0)
    assert first.to_base == pytest.approx(0.1)
    assert first.to_parents == pytest.approx({"math": 0.2, "code": 0.2})
    assert first.shares == pytest.approx({"math": 0.75, "code": 0.025})
    assert first.conflicts == pytest.approx(0.2)


def test_the_verdict_names_shares_conflicts_and_what_was_not_merged():
    said = verdict(NOTED)
    for part in ("10.00% of the base's norm", "math 0.73", "nothing is left of code", "1 copied, 1 cast", "5 tensors"):
        assert part in said
    assert "Nothing was merged" in verdict(Changes(("a",), {"w": Change("copied", 4, (0,))}))
    grown = Change("linear", 4, (0, 1), 4, 1.0, 1.5, None, (0.5, 0.5), (0.5, 0.5), 0.0)
    assert "grew" in verdict(Changes(("a", "b"), {"w": grown}))


def test_a_layer_without_weights_has_no_distances_to_divide():
    empty = Change("linear", 4, (0,), 4, 0.0, 0.0, None, (0.0,), (1.0,), 0.0)
    assert put_together("w", [empty], ["a"]).to_parents == {"a": 0.0}


def test_the_page_has_charts_and_numbers():
    page = Page("merge")
    fill(page, NOTED)
    html = page.render()
    assert html.count('<figure class="chart"') == 3
    assert "layers.10" in html
    assert "share of each parent" in html
