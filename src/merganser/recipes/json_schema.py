"""The native dialect as a JSON Schema, for completion and validation in editors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from merganser.methods.base import Method
from merganser.methods.catalogue import describe
from merganser.methods.parameters import Parameter
from merganser.methods.registry import parameters, registry
from merganser.recipes import keys
from merganser.recipes.keys import TEXT, TEXTS, Section

#: Kinds of parameters by the name of their definition.
_SHAPES: dict[str, dict[str, Any]] = {
    "flag": {"type": "boolean"},
    "whole": {"type": "integer"},
    "real": {"type": "number"},
    "word": TEXT,
    "words": TEXTS,
}


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
    declared = _collect_parameters()
    known = {name: _describe_parameter(name, found) for name, found in sorted(declared.items())}
    per_model = {name: known[name] for name, found in declared.items() if any(p.per_model for p in found)}
    statistics = sorted({kind for method in registry().values() for kind in method.statistics})
    method = {"method": {"enum": _list_methods()}}
    # Of an expression, the models are a mapping from names.
    models = {"anyOf": [keys.RECIPE["models"].schema, keys.EXPRESSION["models"].schema]}
    computed = {**method, "models": models, "statistics": _record(dict.fromkeys(statistics, TEXTS))}
    recipe = {
        **_describe_section({**keys.RECIPE, "expression": keys.EXPRESSION["expression"]}, computed),
        "patternProperties": {"^x-": {}},
        "anyOf": [{"required": ["method"]}, {"required": ["expression"]}],
        "allOf": [{"$ref": "#/$defs/methods"}],
    }
    side = {**TEXT, "description": "Path of this model's statistics, for methods that need them."}
    entry = _describe_section(keys.ENTRY, {}, {**dict.fromkeys(statistics, side), **per_model})
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Merganser recipe",
        **recipe,
        "$defs": {
            "recipe": recipe,
            "methods": {"allOf": [_describe_method(method) for method in registry().values()]},
            **{name: _describe_shape(value) for name, value in _SHAPES.items()},
            "reference": {"anyOf": [TEXT, {"$ref": "#/$defs/entry"}, {"$ref": "#/$defs/recipe"}]},
            "entry": {**entry, "oneOf": [{"required": ["path"]}, {"required": ["recipe"]}]},
            "slice": {**_describe_section(keys.SLICE), "required": ["models"]},
            "module": _describe_section(keys.MODULE),
            "parameters": _record(known),
            "override": {**_describe_section(keys.OVERRIDE, method, known), "required": ["match"]},
            "output": _describe_section(keys.OUTPUT),
            "tokenizer": _describe_section(keys.TOKENIZER),
            "token": _describe_section(keys.TOKEN),
            "token_source": _describe_section(keys.TOKEN_SOURCE),
            "conventions": _describe_section(keys.CONVENTIONS),
        },
    }


def _describe_section(
    section: Section, computed: Mapping[str, Any] | None = None, more: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the schema of a section; some values are `computed` from the registry, and so may be `more` keys."""
    properties = {}
    for name, key in section.items():
        default = {} if key.default is None else {"default": key.default}
        properties[name] = {**(computed or {}).get(name, key.schema), "description": key.help, **default}
    return _record(properties | {name: each for name, each in (more or {}).items() if name not in properties})


def _list_methods() -> list[str]:
    return sorted({name for method in registry().values() for name in (method.name, *method.also)})


def _collect_parameters() -> dict[str, list[Parameter]]:
    """Return the declarations of every parameter, by each of its names."""
    found: dict[str, list[Parameter]] = {}
    for method in registry().values():
        for name, parameter in parameters(method).items():
            for each in (name, *parameter.aliases):
                found.setdefault(each, []).append(parameter)
    return found


def _describe_method(method: type[Method]) -> dict[str, Any]:
    """Return what holds for recipes of a method; its words are the annotations of the consequence."""
    row, found = describe(method), parameters(method)
    own = {
        name: _describe_parameter(name, [parameter]) | _describe_limits(parameter) for name, parameter in found.items()
    }
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


def _describe_limits(parameter: Parameter) -> dict[str, Any]:
    """Return the default and the bounds; JSON Schema applies bounds to numbers alone, not to gradients and globs."""
    found = {"default": parameter.default, "minimum": parameter.low, "maximum": parameter.high}
    return {name: value for name, value in found.items() if value is not None}


def _describe_parameter(name: str, found: list[Parameter]) -> dict[str, Any]:
    """Return the schema of a parameter, which is the same kind of value in every method or one of several."""
    shapes: list[dict[str, Any]] = []
    for parameter in found:
        shape = {"$ref": f"#/$defs/{_name_kind(parameter)}"}
        if parameter.choices is not None:
            shape = _describe_shape({"enum": list(parameter.choices)})
        if shape not in shapes:
            shapes.append(shape)
    help = "; ".join(dict.fromkeys(parameter.help for parameter in found))
    return {"description": help, **(shapes[0] if len(shapes) == 1 else {"anyOf": shapes})}


def _describe_shape(value: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a value, a gradient over depth, or a value for each glob."""
    gradient = {"type": "array", "items": value}
    glob = {"type": "object", "additionalProperties": {"anyOf": [value, gradient]}}
    return {"anyOf": [value, gradient, glob, {"type": "null"}]}


def _name_kind(parameter: Parameter) -> str:
    return {bool: "flag", int: "whole", str: "word", tuple: "words"}.get(parameter.kind, "real")


def _record(properties: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": dict(properties), "additionalProperties": False}
