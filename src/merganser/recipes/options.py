"""Read the sections `output` and `conventions` of a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from merganser.errors import RecipeError, did_you_mean
from merganser.recipes import fields
from merganser.recipes.fields import expect, kind_of, known_keys
from merganser.recipes.quantisation import check_quantisation
from merganser.recipes.schema import (
    ABSENT,
    DEFAULT_TERMS,
    Conventions,
    OutputOptions,
    Part,
    Problems,
    TokenizerOptions,
    TokenRow,
)

OUTPUT_KEYS = ("dtype", "shard_size", "tokenizer", "chat_template", "exclude", "quantize")
#: Rows are padded to the tile size of hardware, which is never larger.
_LARGEST_MULTIPLE = 65536


def output(raw: Any, problems: Problems) -> OutputOptions:
    """Read the section `output`."""
    options: dict[str, Any] = {}
    with problems.collect():
        raw = expect(raw or {}, dict, "output")
        known_keys(raw, OUTPUT_KEYS, "output", problems)
        if raw.get("tokenizer") is not None:
            options["tokenizer"] = tokenizer(raw["tokenizer"], "output.tokenizer", problems)
        options["widest"] = raw.get("dtype") == "widest"
        with problems.collect():
            if raw.get("dtype") is not None and not options["widest"]:
                options["dtype"] = fields.dtype(raw["dtype"], "output.dtype")
        with problems.collect():
            if raw.get("shard_size") is not None:
                options["shard_size"] = fields.size(raw["shard_size"], "output.shard_size")
        with problems.collect():
            if raw.get("chat_template") is not None:
                options["chat_template"] = expect(raw["chat_template"], str, "output.chat_template")
        with problems.collect():
            if raw.get("quantize") is not None:
                options["quantize"] = check_quantisation(expect(raw["quantize"], str, "output.quantize"))
        options["exclude"] = fields.globs(raw.get("exclude"), "output.exclude")
    return OutputOptions(**options)


def conventions(raw: Any, problems: Problems) -> Conventions:
    """Read the section `conventions`."""
    with problems.collect():
        raw = expect(raw or {}, dict, "conventions")
        known_keys(raw, vars(Conventions()), "conventions", problems)
        switches = [key for key in ("base_is_model", "filter_by_source") if key in raw]
        given = {key: expect(raw[key], bool, f"conventions.{key}") for key in switches}
        depth = fields.unquote(raw.get("depth_after_layers", 1.0))
        if type(depth) not in (int, float) or not 0 <= depth <= 1:
            raise RecipeError(f"conventions.depth_after_layers: expected 0 to 1, got {kind_of(depth)}")
        required = fields.names(raw.get("required"), "conventions.required", "a parameter")
        return Conventions(depth_after_layers=float(depth), required=required, **given)
    return Conventions()


def match_experts(raw: Any, parts: Sequence[Part], problems: Problems) -> bool:
    """Read the key `match_experts`."""
    with problems.collect():
        if expect(raw, bool, "match_experts") and any(part.sliced for part in parts):
            raise RecipeError("match_experts: experts are matched layer by layer; a recipe with slices moves layers")
        return bool(raw)
    return False


def tokenizer(value: Any, where: str, problems: Problems) -> TokenizerOptions | None:
    """Read `base`, `union`, a model, or a mapping {source, tokens, pad_to_multiple_of, absent, terms}."""
    if isinstance(value, str):
        return TokenizerOptions(value)
    if not isinstance(value, dict):
        problems.add(where, f"expected base, union, a model or a mapping, got {kind_of(value)}")
        return None
    known_keys(value, ("source", "tokens", "pad_to_multiple_of", "absent", "terms"), where, problems)
    tokens: dict[str, TokenRow] = {}
    multiple = None
    source = "base"
    with problems.collect():
        source = expect(value.get("source") or "base", str, f"{where}.source")
    with problems.collect():
        for token, row in expect(value.get("tokens") or {}, dict, f"{where}.tokens").items():
            with problems.collect():
                tokens[str(token)] = _token_row(row, f"{where}.tokens[{str(token)!r}]", problems)
    with problems.collect():
        if value.get("pad_to_multiple_of") is not None:
            multiple = expect(value["pad_to_multiple_of"], int, f"{where}.pad_to_multiple_of")
            if not 1 <= multiple <= _LARGEST_MULTIPLE:
                raise RecipeError(f"{where}.pad_to_multiple_of: expected 1 to {_LARGEST_MULTIPLE}, got {multiple}")
    absent, terms = value.get("absent"), DEFAULT_TERMS
    if absent is not None and absent not in ABSENT:
        problems.add(f"{where}.absent", f"unknown rule {absent!r}{did_you_mean(str(absent), ABSENT)}")
    with problems.collect():
        if value.get("terms") is not None:
            terms = expect(value["terms"], int, f"{where}.terms")
            if terms < 1 or absent != "omp":
                raise RecipeError(
                    f"{where}.terms: the number of rows that `absent: omp` combines must be at least 1, got {terms}"
                )
    return TokenizerOptions(source, tokens, multiple, absent, terms)


def _token_row(row: Any, where: str, problems: Problems) -> TokenRow:
    if row is None:
        return TokenRow()
    expect(row, dict, where)
    known_keys(row, ("source", "force"), where, problems)
    force = expect(row.get("force", False), bool, f"{where}.force")
    source = row.get("source")
    if source is None or isinstance(source, str):
        return TokenRow(model=source, force=force)
    expect(source, dict, f"{where}.source")
    known_keys(source, ("kind", "model", "token", "token_id"), f"{where}.source", problems)
    if source.get("kind") == "zero":
        return TokenRow(zero=True, force=force)
    if source.get("kind") != "model_token":
        raise RecipeError(f"{where}.source.kind: expected 'zero' or 'model_token', got {kind_of(source.get('kind'))}")
    if (source.get("token") is None) == (source.get("token_id") is None):
        raise RecipeError(f"{where}.source: expected either token or token_id")
    model = expect(source.get("model"), str, f"{where}.source.model")
    if source.get("token") is not None:
        return TokenRow(model, expect(source["token"], str, f"{where}.source.token"), force=force)
    return TokenRow(model, expect(source["token_id"], int, f"{where}.source.token_id"), force=force)
