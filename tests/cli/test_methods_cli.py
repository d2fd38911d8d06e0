"""`merganser methods`, called as a user would."""

import json

import pytest
from typer.testing import CliRunner

from merganser.cli import build
from merganser.errors import RecipeError
from merganser.methods.registry import registry

runner = CliRunner()


def call(*arguments):
    result = runner.invoke(build(), ["methods", *arguments])
    if result.exception is not None:
        raise result.exception
    return result.stdout


def test_the_list_has_a_line_for_each_method(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    lines = call().splitlines()
    for name, method in registry().items():
        assert f"{name:<20} {method.summary}" in lines


def test_one_method_shows_its_formula_parameters_and_other_names():
    shown = call("ties")
    assert "θ = θ_0 + λ" in shown
    assert "0 … 1" in shown
    assert "also lambda" in shown
    assert "base        required" in shown
    assert "cost        two passes over the weights" in shown


@pytest.mark.parametrize("arguments", [(), ("ties",), ("breadcrumbs_ties",)])
def test_sixty_columns_are_enough(monkeypatch, arguments):
    monkeypatch.setenv("COLUMNS", "60")
    shown = call(*arguments)
    assert max(map(len, shown.splitlines())) <= 60
    assert "ties" in shown


def test_a_method_is_found_under_another_tools_name():
    other = next((alias, method) for method in registry().values() for alias in method.also)
    assert call(other[0]).startswith(f"{other[1].name} (also")


def test_json_says_the_same():
    rows = json.loads(call("--json"))
    assert [row["name"] for row in rows] == list(registry())
    ties = json.loads(call("ties", "--json"))
    assert ties == next(row for row in rows if row["name"] == "ties")
    density = next(parameter for parameter in ties["parameters"] if parameter["name"] == "density")
    assert density["default"] == "0.2"
    assert density["per_model"]


def test_methods_made_in_memory_are_shown_as_such():
    assert call().endswith("From Python with data (mg.tuning): adamerging, greedy_soup, regmean_pp.\n")
    shown = call("adamerging")
    assert "from Python with data: mg.tuning.adamerge" in shown
    assert "differences | tsv" in shown
    row = json.loads(call("adamerging", "--json"))
    assert {p["name"]: p["default"] for p in row["parameters"]}["steps"] == "500"
    assert json.loads(call("greedy_soup", "--json"))["parameters"] == []


def test_an_unknown_method_gets_a_suggestion():
    with pytest.raises(RecipeError, match="did you mean 'greedy_soup'"):
        call("greedy_sop")
    with pytest.raises(RecipeError, match="did you mean 'ties'"):
        call("tise")
