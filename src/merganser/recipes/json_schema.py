"""The native dialect as a JSON Schema, for completion and validation in editors."""

from __future__ import annotations

from typing import Any

from merganser.checkpoints.dtypes import ALIASES, FLOATS
from merganser.methods.base import Method
from merganser.methods.catalogue import describe
from merganser.methods.parameters import Parameter
from merganser.methods.registry import parameters, registry
from merganser.recipes.checkpoint_globs import WINDOW
from merganser.recipes.quantisation import QUANTISATIONS

_TEXT = {"type": "string"}
_TEXTS = {"type": "array", "items": _TEXT}
#: Kinds of parameters by the name of their definition.
_SHAPES: dict[str, dict[str, Any]] = {
    "flag": {"type": "boolean"},
    "whole": {"type": "integer"},
    "real": {"type": "number"},
    "word": _TEXT,
    "words": _TEXTS,
}
_SIZE = {"type": ["string", "integer"], "description": "A size such as 5GB or 2GiB, or bytes."}


def recipe_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a native recipe.

    Returns:
        The schema. `$defs.methods` has one condition for every method: its title and description, and its parameters
        with their defaults, bounds and descriptions. Plugins' methods are among them. That a parameter belongs to the
        method is checked when a recipe is loaded, since an override may have a method of its own.

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
            WINDOW: _described(
                {"type": "number", "minimum": 0}, "For a glob: steps to go back from the last checkpoint."
            ),
            "recipe": {"anyOf": [_TEXT, {"$ref": "#/$defs/recipe"}]},
            "label": _TEXT,
            "map": _described(
                {"type": "object", "additionalProperties": _TEXT}, "Prefixes of the model -> prefixes of the base."
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
            "base": _described({"$ref": "#/$defs/reference"}, "The model that task vectors are relative to."),
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
        "allOf": [{"$ref": "#/$defs/methods"}],
    }
    # The models of an expression are a mapping from names.
    recipe["properties"]["models"] = {"anyOf": [models, {"type": "object", "additionalProperties": reference}]}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Merganser recipe",
        **recipe,
        "$defs": {
            "recipe": recipe,
            "methods": {"allOf": [_condition(method) for method in registry().values()]},
            **{name: _shape(value) for name, value in _SHAPES.items()},
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
    """Return the declarations of every parameter, by each of its names."""
    found: dict[str, list[Parameter]] = {}
    for method in registry().values():
        for name, parameter in parameters(method).items():
            for each in (name, *parameter.aliases):
                found.setdefault(each, []).append(parameter)
    return found


def _condition(method: type[Method]) -> dict[str, Any]:
    """Return what holds for recipes of a method; its words are the annotations of the consequence."""
    row, found = describe(method), parameters(method)
    own = {name: _parameter(name, [parameter]) | _limits(parameter) for name, parameter in found.items()}
    each = {name: own[name] for name, parameter in found.items() if parameter.per_model}
    used = {"none": "Only the template of the output.", "optional": "Optional.", "required": "Needed."}[method.base]
    consequence: dict[str, Any] = {
        "title": row.summary,
        "description": row.description,
        "properties": {
            "base": {"description": used},
            "parameters": {"properties": own},
            "models": {"items": {"properties": each}},
        },
    }
    return {"if": {"properties": {"method": {"enum": [row.name, *row.also]}}, "required": ["method"]}} | {
        "then": consequence
    }


def _limits(parameter: Parameter) -> dict[str, Any]:
    """Return the default and the bounds; JSON Schema applies bounds to numbers alone, not to gradients and globs."""
    found = {"default": parameter.default, "minimum": parameter.low, "maximum": parameter.high}
    return {name: value for name, value in found.items() if value is not None}


def _parameter(name: str, found: list[Parameter]) -> dict[str, Any]:
    """Return the schema of a parameter, which is the same kind of value in every method or one of several."""
    shapes: list[dict[str, Any]] = []
    for parameter in found:
        shape = {"$ref": f"#/$defs/{_kind(parameter)}"}
        if parameter.choices is not None:
            shape = _shape({"enum": list(parameter.choices)})
        if shape not in shapes:
            shapes.append(shape)
    help = "; ".join(dict.fromkeys(parameter.help for parameter in found))
    return {"description": help, **(shapes[0] if len(shapes) == 1 else {"anyOf": shapes})}


def _shape(value: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a value, a gradient over depth, or a value for each glob."""
    gradient = {"type": "array", "items": value}
    glob = {"type": "object", "additionalProperties": {"anyOf": [value, gradient]}}
    return {"anyOf": [value, gradient, glob, {"type": "null"}]}


def _kind(parameter: Parameter) -> str:
    return {bool: "flag", int: "whole", str: "word", tuple: "words"}.get(parameter.kind, "real")


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
            "exclude": _described({"anyOf": [_TEXT, _TEXTS]}, "Globs over tensors to exclude."),
            "quantize": _described({"enum": list(QUANTISATIONS)}, "Quantisation of the written weights."),
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
