"""The JSON Schema of recipes accepts what the loader accepts, and catches what an editor can catch."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from merganser.methods.registry import parameters, registry
from merganser.recipes import load, native, options, recipe_schema
from merganser.recipes.schema import Conventions

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
    ],
    ids=str,
)
def test_slips_are_found(change: dict[str, Any], validator: Any) -> None:
    recipe = {"method": "ties", "base": "./base", "models": ["./a", "./b"], **change}
    assert list(validator.iter_errors(recipe))


def test_every_key_and_parameter_is_there() -> None:
    schema = recipe_schema()
    assert set(native.KEYS) <= set(schema["properties"])
    assert set(native._ENTRY_KEYS) <= set(schema["$defs"]["entry"]["properties"])
    assert set(native._OVERRIDE_KEYS) <= set(schema["$defs"]["override"]["properties"])
    assert set(schema["$defs"]["output"]["properties"]) == set(options.OUTPUT_KEYS)
    assert set(schema["$defs"]["conventions"]["properties"]) == set(vars(Conventions()))
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
