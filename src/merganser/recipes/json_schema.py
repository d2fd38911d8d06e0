"""The native dialect as a JSON Schema, for completion and checks in editors."""

from __future__ import annotations

from typing import Any

from merganser.checkpoints.dtypes import ALIASES, FLOATS
from merganser.methods.parameters import Parameter
from merganser.methods.registry import parameters, registry
from merganser.recipes.checkpoint_globs import WINDOW
from merganser.recipes.quantisation import QUANTISATIONS

_TEXT = {"type": "string"}
_TEXTS = {"type": "array", "items": _TEXT}
_SIZE = {"type": ["string", "integer"], "description": "A size such as 5GB or 2GiB, or bytes."}


def recipe_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a native recipe.

    Returns:
        The schema. It knows every method and the parameters of all of them; which parameter belongs to which method is
        checked when a recipe is loaded.

    Example:
        >>> schema = mg.recipes.recipe_schema()
        >>> "method" in schema["properties"]
        True
    """
    known = {name: _parameter(name, found) for name, found in sorted(_parameters().items())}
    per_model = {name: known[name] for name, found in _parameters().items() if any(p.per_model for p in found)}
    statistics = sorted({kind for method in registry().values() for kind in method.statistics})
    settings = {"type": "object", "properties": known, "additionalProperties": False}
    reference = {"anyOf": [_TEXT, {"$ref": "#/$defs/entry"}, {"$ref": "#/$defs/recipe"}]}
    models = {"type": "array", "items": {"$ref": "#/$defs/reference"}, "minItems": 1}
    entry = _record(
        {
            "path": _described(_TEXT, "A directory, a file, a hub id, MODEL+ADAPTER, or a glob over checkpoints."),
            WINDOW: _described({"type": "number", "minimum": 0}, "Of a glob: steps to go back from the last."),
            "recipe": {"anyOf": [_TEXT, {"$ref": "#/$defs/recipe"}]},
            "label": _TEXT,
            "map": _described(
                {"type": "object", "additionalProperties": _TEXT}, "Prefixes: of the model to the base's."
            ),
            "layers": {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2},
            "parameters": {"$ref": "#/$defs/parameters"},
            **dict.fromkeys(statistics, _TEXT),
            **per_model,
        },
        oneOf=[{"required": ["path"]}, {"required": ["recipe"]}],
    )
    part = {"models": models, "base": {"$ref": "#/$defs/reference"}, "parameters": {"$ref": "#/$defs/parameters"}}
    slices = {
        "type": "array",
        "items": {"anyOf": [{"$ref": "#/$defs/entry"}, _record(part, required=["models"])]},
        "minItems": 1,
    }
    section = {"models": models, "slices": slices, "parameters": {"$ref": "#/$defs/parameters"}}
    recipe: dict[str, Any] = {
        "type": "object",
        "properties": {
            "method": _described({"enum": _methods()}, "A name from `merganser methods`."),
            "base": _described({"$ref": "#/$defs/reference"}, "The model that task vectors are differences from."),
            "models": models,
            "slices": slices,
            "modules": {"type": "object", "additionalProperties": _record(section)},
            "parameters": {"$ref": "#/$defs/parameters"},
            "statistics": _record(dict.fromkeys(statistics, _TEXTS)),
            "overrides": {"type": "array", "items": {"$ref": "#/$defs/override"}},
            "output": {"$ref": "#/$defs/output"},
            "seed": {"type": "integer"},
            "match_experts": _described(
                {"type": "boolean"}, "Put the experts of every mixture in the order of the base's before merging."
            ),
            "conventions": {"$ref": "#/$defs/conventions"},
            "expression": _described(_TEXT, "Task arithmetic on one line, such as base + 0.4*(math + code)."),
        },
        "patternProperties": {"^x-": {}},
        "additionalProperties": False,
        "anyOf": [{"required": ["method"]}, {"required": ["expression"]}],
    }
    # The models of an expression have names.
    recipe["properties"]["models"] = {"anyOf": [models, {"type": "object", "additionalProperties": reference}]}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Merganser recipe",
        **recipe,
        "$defs": {
            "recipe": recipe,
            "reference": reference,
            "entry": entry,
            "parameters": settings,
            "override": _override(known),
            "output": _output(),
            "conventions": _conventions(),
        },
    }


def _methods() -> list[str]:
    return sorted({name for method in registry().values() for name in (method.name, *method.also)})


def _parameters() -> dict[str, list[Parameter]]:
    """Return the declarations of every parameter, by all of its names."""
    found: dict[str, list[Parameter]] = {}
    for method in registry().values():
        for name, parameter in parameters(method).items():
            for each in (name, *parameter.aliases):
                found.setdefault(each, []).append(parameter)
    return found


def _parameter(name: str, found: list[Parameter]) -> dict[str, Any]:
    """Return the schema of a parameter: a value, a gradient over depth, or a value for each glob."""
    values: list[dict[str, Any]] = []
    for parameter in found:
        value: dict[str, Any] = {"type": _kind(parameter)}
        if parameter.choices is not None:
            value = {"enum": list(parameter.choices)}
        elif parameter.kind is tuple:
            value = _TEXTS
        if value not in values:
            values.append(value)
    help = "; ".join(dict.fromkeys(parameter.help for parameter in found))
    each = values[0] if len(values) == 1 else {"anyOf": values}
    gradient = {"type": "array", "items": each}
    glob = {"type": "object", "additionalProperties": {"anyOf": [each, gradient]}}
    return {"description": help, "anyOf": [each, gradient, glob, {"type": "null"}]}


def _kind(parameter: Parameter) -> str:
    return {bool: "boolean", int: "integer", str: "string"}.get(parameter.kind, "number")


def _override(known: dict[str, Any]) -> dict[str, Any]:
    own = {
        "match": _described({"anyOf": [_TEXT, _TEXTS]}, "Globs over tensor names."),
        "method": {"enum": _methods()},
        "model": _described(_TEXT, "base, or a model of the recipe, to take the tensors from."),
        "parameters": {"$ref": "#/$defs/parameters"},
    }
    return _record(known | own, required=["match"])


def _output() -> dict[str, Any]:
    tokenizer = {"anyOf": [_described(_TEXT, "base, union, or a model of the recipe."), {"type": "object"}]}
    return _record(
        {
            "dtype": {"enum": [*FLOATS, *ALIASES, "widest"]},
            "shard_size": _SIZE,
            "tokenizer": tokenizer,
            "chat_template": _TEXT,
            "exclude": _described({"anyOf": [_TEXT, _TEXTS]}, "Globs over tensors to leave out."),
            "quantize": _described({"enum": list(QUANTISATIONS)}, "What weights are quantised to as they are written."),
        }
    )


def _conventions() -> dict[str, Any]:
    return _record(
        {
            "base_is_model": {"type": "boolean"},
            "depth_after_layers": {"type": "number", "minimum": 0, "maximum": 1},
            "filter_by_source": {"type": "boolean"},
            "required": _TEXTS,
        }
    )


def _described(schema: dict[str, Any], text: str) -> dict[str, Any]:
    return {**schema, "description": text}


def _record(properties: dict[str, Any], **rules: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False, **rules}
