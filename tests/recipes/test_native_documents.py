"""A recipe of mergekit's dialect is translated into a native document that means the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_mergekit_recipes import EXAMPLES as MERGEKIT_EXAMPLES

from benchmarks.parity import CASES, document
from benchmarks.parity_dialect import other_cases, parameter_cases
from merganser import recipes
from merganser.engine.plan import Plan
from merganser.errors import InputError, RecipeError
from merganser.plain import to_yaml
from merganser.recipes import keys

MODELS = ["base", "a", "b", "c"]
DIALECT = [*parameter_cases("base", MODELS[1:]), *other_cases("base", MODELS[1:], "narrow")]
OWN = {path.stem: path.read_text() for path in sorted((Path(__file__).parents[2] / "examples/recipes").glob("*.yml"))}
NESTED = {
    "inline": {
        "merge_method": "dare_linear",
        "base_model": "base",
        "models": [
            {
                "model": {
                    "merge_method": "slerp",
                    "base_model": "a",
                    "models": [{"model": "b"}],
                    "parameters": {"t": 0.3},
                },
                "parameters": {"weight": 0.5, "density": 0.5},
            }
        ],
    },
    "modules": {
        "merge_method": "linear",
        "modules": {
            "text_decoder": {
                "slices": [{"sources": [{"model": "a", "layer_range": [0, 4]}, {"model": "b", "layer_range": [0, 4]}]}],
                "parameters": {"weight": [{"filter": "layers.1", "value": 0.2}, {"value": 0.4}]},
            }
        },
    },
    "filters": {
        "merge_method": "ties",
        "base_model": "base",
        "models": [{"model": "a", "parameters": {"weight": 1}}, {"model": "b", "parameters": {"weight": 1}}],
        "parameters": {"density": [{"filter": "mlp", "value": 0.3}], "lambda": [0.2, 0.8], "int8_mask": True},
        "tokenizer_source": "base",
        "exclude": "lm_head*",
    },
}
RECIPES = {
    **{f"parity: {case}": to_yaml(document(case, [Path(name) for name in MODELS])) for case in CASES},
    **{f"dialect: {kind}, {name}": to_yaml(each) for kind, name, each in DIALECT},
    **{f"mergekit: {name}": text for name, text in MERGEKIT_EXAMPLES.items()},
    **{f"nested: {name}": to_yaml(each) for name, each in NESTED.items()},
    **{f"example: {name}": text for name, text in OWN.items()},
    "expression": "expression: base + 0.4*(a - b)\nmodels: {base: base, a: a, b: b}\n",
}


def native_document(text: str) -> Any:
    return recipes.load(text).document


def meaning(name: str, hub: Any, translated: str | None = None) -> Any:
    """The plan without what is only said: notes, and the recipe's own text; or that there is none."""

    def bare(plan: Plan) -> Plan:
        models = tuple(replace(model, plan=bare(model.plan) if model.plan else None) for model in plan.models)
        return replace(plan, models=models, sidecars=replace(plan.sidecars, recipe=""), notes=())

    try:
        opener = hub(layers=40 if name.startswith("mergekit") else 4)
        return bare(recipes.plan(recipes.load(translated or RECIPES[name]), opener))
    except InputError:
        return "refused"


@pytest.mark.parametrize("name", RECIPES)
def test_the_translation_has_the_same_plan(name: str, hub: Any) -> None:
    try:
        translated = to_yaml(native_document(RECIPES[name]))
    except RecipeError:
        assert meaning(name, hub) == "refused"
        return
    assert "merge_method" not in translated
    assert "base_model" not in translated
    assert meaning(name, hub, translated) == meaning(name, hub)


@pytest.mark.parametrize("name", [name for name in RECIPES if not name.startswith("dialect")])
def test_there_is_a_plan_to_compare(name: str, hub: Any) -> None:
    assert meaning(name, hub) != "refused"


def test_a_translation_is_its_own_translation() -> None:
    once = native_document(to_yaml(NESTED["filters"]))
    assert native_document(to_yaml(once)) == once
    assert set(once) <= set(keys.RECIPE)
    assert once["parameters"] == {"density": {"*mlp*": 0.3, "*": 1.0}, "scale": [0.2, 0.8]}
    assert once["conventions"] == {
        "base_is_model": True,
        "depth_after_layers": 0.0,
        "filter_by_source": True,
        "required": ["weight"],
    }


def test_filters_with_the_signs_of_globs_are_still_parts_of_names() -> None:
    text = (
        "merge_method: linear\nmodels: [{model: a, parameters: {weight: [{filter: 'w[0]*', value: 2}, {value: 1}]}}]\n"
    )
    weight = native_document(text)["models"][0]["parameters"]["weight"]
    case = recipes.load(text).parts[0].slices[0].models[0].parameters["weight"].cases[0]
    assert list(weight) == ["*w[[]0][*]*", "*"]
    assert case.matches("x.w[0]*.y")
    assert not case.matches("x.w0.y")


@pytest.mark.parametrize(
    ("conventions", "message"),
    [
        ("{base_is_modle: true}", "conventions: unknown key 'base_is_modle'; did you mean 'base_is_model'"),
        ("{depth_after_layers: 2}", "conventions.depth_after_layers: expected 0 to 1, got 2"),
        ("{depth_after_layers: .nan}", "conventions.depth_after_layers: expected 0 to 1, got nan"),
        ("{required: 3}", "conventions.required: expected a parameter or a list of them, got 3"),
        ("{filter_by_source: perhaps}", "conventions.filter_by_source: expected true or false, got 'perhaps'"),
        ("[]", "conventions: expected a mapping"),
    ],
)
def test_conventions_are_checked(conventions: str, message: str) -> None:
    text = f"method: linear\nmodels: [a, b]\nconventions: {conventions}\n"
    if conventions == "[]":
        text = text.replace("[]\n", "[1]\n")
    with pytest.raises(RecipeError) as refused:
        recipes.load(text)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("base", "output.tokenizer.tokens['<x>']: expected a mapping, got 'base'"),
        ("{source: [1]}", "output.tokenizer.tokens['<x>'].source: expected a mapping, got"),
    ],
)
def test_rows_of_tokens_are_checked(row: str, message: str) -> None:
    text = f"method: linear\nmodels: [a, b]\noutput: {{tokenizer: {{tokens: {{'<x>': {row}}}}}}}\n"
    with pytest.raises(RecipeError) as refused:
        recipes.load(text)
    assert message in str(refused.value)
