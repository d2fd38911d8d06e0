"""Arithmetic on models in recipes: what it means, what it refuses, and that the engine computes it."""

from __future__ import annotations

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

import merganser as mg
from merganser import recipes
from merganser.errors import RecipeError
from merganser.recipes.expressions import read_coefficients

MODELS = {name: f"./{name}" for name in ("base", "math", "code", "toxic")}


def used(expression, *names):
    return read_coefficients(expression, {name: name for name in names})


def test_a_sum_with_parentheses():
    found = read_coefficients("base + 0.4*(math + code) - toxic", MODELS)
    assert found == {"base": 1, "math": 0.4, "code": 0.4, "toxic": -1}
    assert used("-(a - 2*b)/4 + b", "a", "b") == {"a": -0.25, "b": 1.5}
    assert used("(1 + 2) * a / (2 - 1.5)", "a") == {"a": 6}
    assert used("a\n  + +b", "a", "b") == {"a": 1, "b": 1}


numbers = st.floats(-9, 9, allow_nan=False).map(lambda x: round(x, 2))


@st.composite
def sums(draw, depth=3):
    """A text and a function of the same meaning."""
    kind = draw(st.sampled_from(["name", "add", "sub", "scale", "divide", "negate"])) if depth else "name"
    if kind == "name":
        name = draw(st.sampled_from("abc"))
        return name, lambda v: v[name]
    text, value = draw(sums(depth=depth - 1))
    if kind in ("add", "sub"):
        other, more = draw(sums(depth=depth - 1))
        sign = 1 if kind == "add" else -1
        return f"({text}) {'+' if sign > 0 else '-'} ({other})", lambda v: value(v) + sign * more(v)
    if kind == "negate":
        return f"-({text})", lambda v: -value(v)
    x = draw(numbers)
    if kind == "scale":
        return f"({x}) * ({text})", lambda v: x * value(v)
    return f"({text}) / ({abs(x) + 1})", lambda v: value(v) / (abs(x) + 1)


@given(sums(), numbers, numbers, numbers)
def test_any_expression_means_what_python_says(made, a, b, c):
    text, value = made
    names = {name for name in "abc" if name in text}
    found = used(text, *names)
    values = {"a": a, "b": b, "c": c}
    assert sum(found[n] * values[n] for n in names) == pytest.approx(value(values), rel=1e-9, abs=1e-6)


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("base + maht", "unknown model 'maht'; did you mean 'math'?"),
        ("base * math", "models can be added, not multiplied: base * math"),
        ("1 / math", "cannot divide by a model"),
        ("math / 0", "division by zero"),
        ("base + 1", "a number and a model cannot be added"),
        ("0.5", "a number alone is not a model"),
        ("base +", "not valid arithmetic at column"),
        ("math ** 2", "only names, numbers"),
        ("__import__('os')", "only names, numbers"),
        ("math.weight", "only names, numbers"),
        ("~math", "only names, numbers"),
        ("math if code else base", "only names, numbers"),
        ("'math'", "neither a model nor a number"),
        ("True * math", "neither a model nor a number"),
        ("1e400 * math", "too large"),
        ("9" * 400 + " * math", "too large"),
        ("base + math", "models.code: is not used"),
        ("(" * 3000 + "math" + ")" * 3000, "expression: "),
        ("math\0", "expression: "),
        ("+".join(["math"] * 4000), "longer than"),
        ("", "expected arithmetic"),
        (3, "expected arithmetic"),
    ],
)
def test_refusals(expression, message):
    with pytest.raises(RecipeError) as caught:
        read_coefficients(expression, MODELS)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"expression": "2*base + math", "models": {"base": "b", "math": "m"}}, "the factor of base is 2"),
        ({"expression": "math - math + base", "models": {"base": "b", "math": "m"}}, "every task vector cancels"),
        ({"expression": "a - a", "models": {"a": "x"}}, "everything cancels"),
        ({"expression": "a", "models": ["a"]}, "models: expected a mapping of names to models, got a list"),
        ({"expression": "a", "models": {"my-model": "x"}}, "'my-model' cannot be used in an expression"),
        ({"expression": "a", "models": {"a": 3}}, "expected a path or a recipe"),
        ({"expression": "a", "models": {"a": "x"}, "sead": 1}, "unknown key 'sead'; did you mean 'seed'?"),
        ({"expression": "a", "models": {"a": "x"}, "method": "ties"}, "unknown key 'method'"),
    ],
)
def test_bad_recipes(document, message):
    with pytest.raises(RecipeError) as caught:
        recipes.load(document)
    assert message in str(caught.value)


def write(tmp_path, directory, count=4):
    return [directory(name, seed=i, config={"model_type": "llama"}) for i, name in enumerate("wxyz"[:count])]


def test_the_engine_computes_it(tmp_path, directory):
    base, a, b, c = write(tmp_path, directory)
    recipe = tmp_path / "sum.yml"
    models = {"base": "w", "math": "x", "code": "y", "toxic": "z"}
    recipe.write_text(yaml.safe_dump({"expression": "base + 0.4*(math + code) - toxic", "models": models}))
    out = mg.run(recipe, tmp_path / "out")
    made = mg.open(out)
    weights, sources = (0.4, 0.4, -1.0), [mg.open(path) for path in (a, b, c)]
    for name in made.names():
        anchor = mg.open(base).read(name).double()
        expected = anchor + sum(w * (s.read(name).double() - anchor) for w, s in zip(weights, sources, strict=True))
        assert torch.allclose(made.read(name).double(), expected, atol=1e-5)
    tv = [mg.TaskVector(path, base) for path in (a, b, c)]
    same = (0.4 * (tv[0] + tv[1]) - tv[2]).apply_to(base)
    assert all(torch.allclose(same.read(n), made.read(n), atol=1e-5) for n in made.names())


def test_without_a_base_names_are_weights(tmp_path, directory):
    a, b, c = write(tmp_path, directory, 3)
    out = mg.run({"expression": "a - b + c", "models": {"a": a, "b": b, "c": c}}, tmp_path / "out")
    name = "model.norm.weight"
    x, y, z = (mg.open(path).read(name) for path in (a, b, c))
    assert torch.allclose(mg.open(out).read(name), x - y + z, atol=1e-6)


def test_a_sum_that_is_no_average_is_noted(tmp_path, directory):
    a, b = write(tmp_path, directory, 2)
    models = {"a": a, "b": b}
    assert any(
        "sum to 2" in note for note in recipes.plan(recipes.load({"expression": "a + b", "models": models})).notes
    )
    average = recipes.plan(recipes.load({"expression": "0.3*a + 0.7*b", "models": models}))
    assert not any("sum to" in note for note in average.notes)


def test_an_expression_is_a_model_of_another_recipe(tmp_path, directory):
    a, b, c = write(tmp_path, directory, 3)
    inner = {"expression": "2*p - q", "models": {"p": str(a), "q": str(b)}}
    outer = {"method": "linear", "models": [inner, {"path": str(c)}]}
    name = "model.norm.weight"
    x, y, z = (mg.open(path).read(name) for path in (a, b, c))
    assert torch.allclose(mg.open(mg.run(outer, tmp_path / "o")).read(name), (2 * x - y + z) / 2, atol=1e-6)
    nested = {"expression": "0.5*r + 0.5*s", "models": {"r": inner, "s": str(c)}}
    assert torch.allclose(mg.open(mg.run(nested, tmp_path / "n")).read(name), (2 * x - y + z) / 2, atol=1e-6)
