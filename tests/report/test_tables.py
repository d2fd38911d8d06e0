"""Tables as text: they fit the terminal, and numbers read as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from merganser.report.page import Page
from merganser.report.tables import Table, show

WIDE = Table(
    ["matrix", "shape", "rank", "STI", "after TSV-Merge", "normalised", "× chance", "energy kept"],
    [[f"model.layers.{i}.self_attn.q_proj.weight", "2048×2048", 682, 12345.6, 1e-9, 0.5, 12.3, 0.91] for i in (2, 10)],
    "Every matrix",
)


@pytest.mark.parametrize("width", [60, 80, 100])
def test_a_wide_table_fits_and_keeps_every_figure(width):
    text = WIDE.text(width=width)
    assert max(map(len, text.splitlines())) <= width
    for part in ("12,346", "1e-09", "0.910", "after TSV-Merge", "energy kept", "682"):
        assert part in text
    assert len({line.split()[0] for line in text.splitlines() if line.startswith("model")}) == 2, (
        "rows can be told apart"
    )


def test_ranges_of_numbers_are_never_shortened():
    rows = [
        ["task_arithmetic scale=0.5", 0.0, "0.000 to 0.300", 0.0, "-0.327 to +0.327", "cannot tell"],
        ["math", 0.0, "0.000 to 0.300", None, "", ""],
    ]
    text = Table(["contender", "score", "95 %", "gain", "95 %", "better than the best"], rows).text(width=60)
    assert text.count("0.000 to 0.300") == 2
    assert "-0.327 to +0.327" in text
    assert max(map(len, text.splitlines())) <= 60


def test_parts_begin_with_the_first_column():
    text = WIDE.text(width=60)
    parts = text.split("\n\n")
    assert len(parts) > 1
    names = {tuple(line.split()[0] for line in part.splitlines()[-2:]) for part in parts}
    assert len(names) == 1


def test_a_table_that_fits_stays_in_one_part():
    assert WIDE.text(width=200) == WIDE.text(width=10_000)
    assert "…" not in WIDE.text(width=200)


@given(
    st.lists(st.lists(st.text("abc.0", max_size=40), min_size=4, max_size=4), max_size=4),
    st.integers(60, 120),
)
def test_text_tables_always_fit(rows, width):
    text = Table(["name", "one", "two", "three"], rows).text(width=width)
    assert all(len(line) <= width for line in text.splitlines())


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (1234567, "1,234,567"),
        (12, "12"),
        (True, "True"),
        (None, ""),
        (4321.0, "4,321"),
        (0.5, "0.500"),
        (1e-5, "1e-05"),
    ],
)
def test_numbers_have_separators(value, shown):
    assert show(value) == shown


def test_numbers_with_separators_sort_by_value_on_a_page():
    page = Page("t")
    page.table(["n", "method"], [[1000, "ties"], [999, "dare"]])
    html = page.render()
    assert 'data-value="1000">1,000' in html
    assert '<th scope="col" class="t">method</th>' in html


def test_sentences_are_broken_between_words_and_nothing_of_them_is_lost():
    sentence = "not a transformers model: no config.json with a model_type"
    table = Table(("check", "status", "finding"), [("weights", "pass", "fine"), ("loads", "skip", sentence)], "Checks")
    lines = table.text(40).split("\n")
    assert max(map(len, lines)) <= 40
    assert " ".join(" ".join(lines[3:]).split()) == f"loads skip {sentence}"
    assert table.text(200).split("\n")[-1].endswith(sentence)


def test_a_caption_is_broken_too():
    assert max(map(len, Table(("a",), [(1,)], "a caption of many words " * 5).text(60).split("\n"))) <= 60
