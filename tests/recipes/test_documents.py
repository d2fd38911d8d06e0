"""YAML that stands for more than it should, or for something else than it seems."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from merganser import recipes
from merganser.errors import InputError, RecipeError
from merganser.recipes import keys, mergekit
from merganser.recipes.documents import parse

TWO = "models: [./a, ./b]"


def _expanding(template: str) -> str:
    """Nine lines, each of which names the one before ten times."""
    names = "abcdefghi"
    lines = [f"x-{b}: &{b} " + template % ", ".join([f"*{a}"] * 10) for a, b in itertools.pairwise(names)]
    return "\n".join(["x-a: &a {p: 1}", *lines])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (_expanding("[%s]"), "expand to more than 100,000 values"),
        (_expanding("{<<: [%s]}"), "expand to more than 100,000 values"),
        ("x-a: &a [*a]", "line 1: an alias refers to a value that contains it"),
        ("x-a: " + "[" * 3000, "line 1: nested more than 100 deep"),
        ("x-0: &a0 [1]\n" + "\n".join(f"x-{i}: &a{i} [*a{i - 1}]" for i in range(1, 300)), "nested more than 100 deep"),
        ("seed: 0x" + "f" * 5000, "line 1: the number 0xfffffffffffffffffffff… is too large"),
        ("seed: " + "9" * 5000, "line 1: not a whole number, or one too large"),
        ("seed: !!float x", "not valid YAML"),
        ("seed: !!bool x", "not valid YAML"),
    ],
)
def test_documents_that_stand_for_too_much_are_refused(text, message):
    with pytest.raises(RecipeError) as error:
        recipes.load(f"{text}\n---\nmethod: linear\n{TWO}\n")
    assert message in str(error.value)


def test_a_path_that_looks_like_a_date_is_a_path():
    recipe = recipes.load("method: linear\nmodels: [2024-01-01, 2024-13-45]")
    assert [entry.label for entry in recipe.entries()] == ["2024-01-01", "2024-13-45"]


WORDS = [
    "a",
    "ties",
    "linear",
    "passthrough",
    "slerp",
    "moe",
    "base",
    "union",
    "0.5",
    "false",
    "*",
    "",
    "./a",
    "bfloat16",
]
KEYS = [
    *keys.RECIPE, *mergekit.KEYS, "path", "model", "recipe", "layers", "layer_range", "sources", "tokens", "match",
    "weight", "density", "t", "scale", "filter", "value", "expression", "experts", "x-a", "label", "int8_mask",
]  # fmt: skip
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 10**12) | st.floats() | st.sampled_from(WORDS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=6), st.sampled_from(["method", "merge_method", "seed"]))
@settings(max_examples=400, deadline=None)
def test_whatever_a_document_holds_it_is_read_or_refused(document, key):
    document[key] = document.get(key, "ties")
    try:
        recipes.load(document)
    except InputError as error:
        assert error.exit_code == 2
        assert "Traceback" not in str(error)


def test_half_a_character_is_refused_and_a_whole_one_is_read():
    assert parse('{"path": "\\ud83d\\ude00 \\u00e9", "plain": "\U0001f600"}') == [
        {"path": "\U0001f600 é", "plain": "\U0001f600"}
    ]
    for text in ('{"path": "\\ud800"}', '{"\\udfff": 1}'):
        with pytest.raises(RecipeError, match="line 1: a text contains half of a surrogate pair"):
            parse(text)


@pytest.mark.parametrize("count", [150_000, 300_000])
def test_a_text_with_too_many_values_is_refused(count):
    text = "method: linear\nmodels: [" + "a," * count + "b]"
    with pytest.raises(RecipeError, match="recipe: more than 100,000 values; split it into nested recipes"):
        parse(text)


@pytest.mark.parametrize("text", ["merge_method: linear\nmodels:\n{}", "method: linear\nmodels:\n{}"])
def test_a_list_of_too_many_models_is_refused(text):
    entry = "  - {model: a}\n" if text.startswith("merge") else "  - a\n"
    with pytest.raises(RecipeError, match=r"models: 10,001 entries; at most 10,000 are read, so nest recipes"):
        recipes.load(text.format(entry * 10_001))
