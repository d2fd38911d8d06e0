"""The keys of a native recipe, each declared once.

A section of a recipe is a mapping from the names of its keys to a `Key`. The parser (`native`, `options`), the
suggestions in its messages, the JSON Schema (`json_schema`) and the tables in the documentation all read these
sections.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from merganser.checkpoints.dtypes import ALIASES, FLOATS
from merganser.errors import RecipeError, did_you_mean
from merganser.recipes import fields
from merganser.recipes.fields import expect, kind_of, report_unknown_keys
from merganser.recipes.quantisation import QUANTISATIONS, check_quantisation
from merganser.recipes.schema import ABSENT, DEFAULT_SHARD_SIZE, DEFAULT_TERMS, Problems

TEXT = {"type": "string"}
TEXTS = {"type": "array", "items": TEXT}
#: Rows are padded to the tile size of hardware, which is never larger.
_LARGEST_MULTIPLE = 65536


@dataclass(frozen=True)
class Key:
    """A key of a recipe.

    Attributes:
        help: What it means.
        schema: The JSON Schema of its values; names of methods and parameters are filled in from the registry.
        read: Reads a value, given its place for messages. None if reading needs the rest of the recipe.
        default: The value if the key is left out, as it would be written.
    """

    help: str
    schema: Mapping[str, Any]
    read: Callable[[Any, str], Any] | None = None
    default: Any = None


Section = Mapping[str, Key]


def read_section(
    section: Section, raw: Any, where: str, problems: Problems, inner: Mapping[str, Section] | None = None
) -> dict[str, Any]:
    """Return the values of the keys that are given, and report invalid values and unknown keys.

    A key that belongs to an `inner` section is reported with the name of that section.
    """
    found: dict[str, Any] = {}
    with problems.collect():
        given = expect(raw or {}, dict, where)
        report_unknown_keys(given, section, where, problems, inner)
        for name, key in section.items():
            with problems.collect():
                if key.read is not None and given.get(name) is not None:
                    found[name] = key.read(given[name], f"{where}.{name}" if where else name)
    return found


def _text(help: str, default: str | None = None) -> Key:
    return Key(help, TEXT, lambda value, where: expect(value, str, where), default)


def _flag(help: str) -> Key:
    return Key(help, {"type": "boolean"}, lambda value, where: expect(value, bool, where), False)


def _number(help: str, kind: str, low: float, high: float | None = None, default: float | None = None) -> Key:
    def read(value: Any, where: str) -> Any:
        found = expect(value, int, where) if kind == "integer" else fields.unquote(value)
        if type(found) not in (int, float) or not low <= found <= (math.inf if high is None else high):
            expected = f"at least {low}" if high is None else f"{low} to {high}"
            raise RecipeError(f"{where}: expected {expected}, got {kind_of(found)}")
        return found

    bounds = {"minimum": low} | ({} if high is None else {"maximum": high})
    return Key(help, {"type": kind, **bounds}, read, default)


def _globs(help: str) -> Key:
    return Key(help, {"anyOf": [TEXT, TEXTS]}, fields.read_globs)


def _dtype(value: Any, where: str) -> str:
    return "widest" if value == "widest" else fields.read_dtype(value, where)


def _absent(value: Any, where: str) -> str:
    if value not in ABSENT:
        raise RecipeError(f"{where}: unknown rule {value!r}{did_you_mean(str(value), ABSENT)}")
    return str(value)


def _reference(name: str) -> dict[str, str]:
    return {"$ref": f"#/$defs/{name}"}


_models = Key("The models to merge.", {"type": "array", "items": _reference("reference"), "minItems": 1})
_slices = Key(
    "Instead of models: runs of layers, stacked in this order.",
    {"type": "array", "items": {"anyOf": [_reference("entry"), _reference("slice")]}, "minItems": 1},
)
_parameters = Key("Parameters of the method.", _reference("parameters"))
_seed = Key("Seed of methods that draw at random.", {"type": "integer"}, lambda v, where: expect(v, int, where), 0)

RECIPE: Section = {
    "method": Key("The merging rule; `merganser methods` lists them.", {}),
    "base": Key("The model that task vectors are relative to.", _reference("reference")),
    "models": _models,
    "slices": _slices,
    "modules": Key(
        "Instead of models: parts of the network, each with its own models or slices.",
        {"type": "object", "additionalProperties": _reference("module")},
    ),
    "parameters": Key("Parameters of the method, for all models.", _reference("parameters")),
    "statistics": Key("Statistics of all models by kind, in the order of the models.", {}),
    "overrides": Key(
        "Other methods or values for some tensors; the first match applies.",
        {"type": "array", "items": _reference("override")},
    ),
    "output": Key("What is written.", _reference("output")),
    "seed": _seed,
    "match_experts": _flag("Put the experts of every mixture in the order of the base's before merging."),
    "conventions": Key("What the recipe means where it could mean two things.", _reference("conventions")),
}
EXPRESSION: Section = {
    "expression": Key("Task arithmetic on one line, such as base + 0.4*(math + code).", TEXT),
    "models": Key(
        "The models of an expression by name.", {"type": "object", "additionalProperties": _reference("reference")}
    ),
    **{name: RECIPE[name] for name in ("overrides", "output", "seed", "match_experts")},
}
ENTRY: Section = {
    "path": Key("A directory, a file, a hub id, MODEL+ADAPTER, or a glob over checkpoints.", TEXT),
    "window": Key("For a glob: steps to go back from the last checkpoint.", {"type": "number", "minimum": 0}),
    "recipe": Key("Instead of a path: a recipe, or the path of one.", {"anyOf": [TEXT, _reference("recipe")]}),
    "label": Key("Name of a nested recipe in messages and results.", TEXT),
    "map": Key("Prefixes of the model -> prefixes of the base.", {"type": "object", "additionalProperties": TEXT}),
    "layers": Key(
        "In a slice: the layers [first, last).",
        {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2},
        fields.read_layer_range,
    ),
    "parameters": Key("Parameters of the method, for this model.", _reference("parameters")),
}
SLICE: Section = {
    "models": _models,
    "base": Key("Base of this slice; default: the recipe's.", _reference("reference")),
    "parameters": _parameters,
}
MODULE: Section = {"models": _models, "slices": _slices, "parameters": _parameters}
OVERRIDE: Section = {
    "match": _globs("Globs over tensor names."),
    "method": Key("Another merging rule.", {}),
    "model": Key("base, or a model of the recipe, to take the tensors from.", TEXT),
    "parameters": _parameters,
}
OUTPUT: Section = {
    "dtype": Key("Dtype of the weights; default: the base's.", {"enum": [*FLOATS, *ALIASES, "widest"]}, _dtype),
    "shard_size": Key(
        "Largest file: a size such as 5GB or 2GiB, or bytes.",
        {"type": ["string", "integer"]},
        fields.read_size,
        f"{DEFAULT_SHARD_SIZE // 10**9}GB",
    ),
    "tokenizer": Key(
        "base, union, a model, or a mapping; default: the base's files, and no vocabulary changes.",
        {"anyOf": [TEXT, _reference("tokenizer")]},
    ),
    "chat_template": _text("auto (the most common of the models), a known name such as chatml, a file, or a template."),
    "exclude": _globs("Globs over tensors to exclude."),
    "quantize": Key(
        "Quantisation of the written weights.",
        {"enum": list(QUANTISATIONS)},
        lambda value, where: check_quantisation(expect(value, str, where)),
    ),
}
TOKENIZER: Section = {
    "source": _text("base, union or a model.", "base"),
    "tokens": Key(
        "Where the row of a token comes from.", {"type": "object", "additionalProperties": _reference("token")}
    ),
    "pad_to_multiple_of": _number("Pad the rows to a multiple of this.", "integer", 1, _LARGEST_MULTIPLE),
    "absent": Key(
        "Rule for tokens that a model lacks; default: the other models' rows.", {"enum": list(ABSENT)}, _absent
    ),
    "terms": _number("Rows that `absent: omp` combines.", "integer", 1, default=DEFAULT_TERMS),
}
TOKEN: Section = {
    "source": Key("A model, or a mapping that names a row.", {"anyOf": [TEXT, _reference("token_source")]}),
    "force": _flag("Use this row also for models that have the token."),
}
TOKEN_SOURCE: Section = {
    "kind": Key("zero, or model_token for the row of another token.", {"enum": ["zero", "model_token"]}),
    "model": _text("Model that has the row."),
    "token": _text("The other token."),
    "token_id": Key("Or its number.", {"type": "integer"}, lambda value, where: expect(value, int, where)),
}
CONVENTIONS: Section = {
    "base_is_model": _flag("A method without a base counts the base as its first model, listed or not."),
    "depth_after_layers": _number("Depth t of tensors after the layers, such as the head.", "number", 0, 1, 1.0),
    "filter_by_source": _flag("Patterns in a model's parameters match the tensor's name in that model."),
    "required": Key(
        "Per-model parameters that should be given.",
        {"anyOf": [TEXT, TEXTS]},
        lambda value, where: fields.read_texts(value, where, "a parameter"),
    ),
}
