"""The JSON Schema of recipes accepts what the loader accepts, and catches what an editor can catch."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from merganser.methods.registry import parameters, registry
from merganser.recipes import keys, load, recipe_schema

jsonschema = pytest.importorskip("jsonschema")
ROOT = Path(__file__).parents[2]
PAGES = ["README.md", "docs/howto.md", "docs/recipes.md", "docs/index.md"]


def recipes() -> list[Any]:
    """Every native recipe of the examples and the documentation."""
    texts = [path.read_text() for path in sorted((ROOT / "examples" / "recipes").glob("*.yml"))]
    for page in PAGES:
        texts += re.findall(r"^```yaml\n(.*?)^```$", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    found = [yaml.safe_load(text) for text in texts]
    return [each for each in found if "merge_method" not in each and "space" not in each]


@pytest.fixture(scope="module")
def validator() -> Any:
    schema = json.loads(json.dumps(recipe_schema()))
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@pytest.mark.parametrize("recipe", recipes(), ids=lambda recipe: str(recipe.get("method", "expression")))
def test_documented_recipes_fit(recipe: Any, validator: Any) -> None:
    load(recipe)
    assert not list(validator.iter_errors(recipe))


@pytest.mark.parametrize(
    "change",
    [
        {"metod": "ties"},
        {"method": "tise"},
        {"parameters": {"densty": 0.2}},
        {"parameters": {"density": 3}},
        {"models": [{"path": "./a", "weight": "much"}]},
        {"models": []},
        {"models": [{"path": "./a", "wieght": 1}]},
        {"output": {"dtype": "bfloat61"}},
        {"overrides": [{"method": "linear"}]},
        {"seed": "zero"},
        {"output": {"tokenizer": {"sources": "union"}}},
        {"output": {"tokenizer": {"tokens": {"<s>": {"source": {"kind": "one"}}}}}},
    ],
    ids=str,
)
def test_slips_are_found(change: dict[str, Any], validator: Any) -> None:
    recipe = {"method": "ties", "base": "./base", "models": ["./a", "./b"], **change}
    assert list(validator.iter_errors(recipe))


SECTIONS = {
    "recipe": keys.RECIPE,
    "entry": keys.ENTRY,
    "slice": keys.SLICE,
    "module": keys.MODULE,
    "override": keys.OVERRIDE,
    "output": keys.OUTPUT,
    "tokenizer": keys.TOKENIZER,
    "token": keys.TOKEN,
    "token_source": keys.TOKEN_SOURCE,
    "conventions": keys.CONVENTIONS,
}


@pytest.mark.parametrize("name", SECTIONS)
def test_every_key_has_its_words_in_the_schema(name: str) -> None:
    properties = recipe_schema()["$defs"][name]["properties"]
    for key, declared in SECTIONS[name].items():
        assert properties[key]["description"] == declared.help
        assert properties[key].get("default") == declared.default
        assert declared.help[-1] == "."


def test_keys_become_the_fields_of_the_recipe_and_their_defaults_agree() -> None:
    recipe = load({"method": "linear", "models": ["a", "b"], "output": {"tokenizer": {"absent": "omp"}}})
    assert recipe.output.tokenizer is not None
    for section, record in (
        (keys.OUTPUT, recipe.output),
        (keys.CONVENTIONS, recipe.conventions),
        (keys.TOKENIZER, recipe.output.tokenizer),
    ):
        for name, key in section.items():
            stated = key.read(key.default, name) if key.read and key.default is not None else None
            if stated is not None:
                assert getattr(record, name) == stated
            else:
                assert hasattr(record, name)
    assert recipe.seed == keys.RECIPE["seed"].default
    assert recipe.match_experts == keys.RECIPE["match_experts"].default


def test_the_guide_lists_every_key() -> None:
    text = (ROOT / "docs" / "recipes.md").read_text()
    for section in (keys.RECIPE, keys.OUTPUT):
        assert [name for name in section if f"| `{name}`" not in text] == []


def test_every_parameter_is_there() -> None:
    schema = recipe_schema()
    known = schema["$defs"]["parameters"]["properties"]
    for method in registry().values():
        for name, parameter in parameters(method).items():
            assert {name, *parameter.aliases} <= set(known)
            assert (name in schema["$defs"]["entry"]["properties"]) or not parameter.per_model


def test_the_command_prints_both(capsys: pytest.CaptureFixture[str]) -> None:
    from merganser.cli.schema import command

    for document, title in (("recipe", "Merganser recipe"), ("run", "RunFile")):
        command(document)
        assert json.loads(capsys.readouterr().out)["title"] == title
