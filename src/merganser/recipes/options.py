"""Read the sections `output` and `conventions` of a recipe."""

from __future__ import annotations

from typing import Any

from merganser.errors import RecipeError
from merganser.recipes.fields import expect, kind_of
from merganser.recipes.keys import CONVENTIONS, OUTPUT, TOKEN, TOKEN_SOURCE, TOKENIZER, read_section
from merganser.recipes.schema import Conventions, OutputOptions, Problems, TokenizerOptions, TokenRow


def read_output(raw: Any, problems: Problems) -> OutputOptions:
    """Read the section `output`."""
    found = read_section(OUTPUT, raw, "output", problems)
    if isinstance(raw, dict) and raw.get("tokenizer") is not None:
        found["tokenizer"] = read_tokenizer(raw["tokenizer"], "output.tokenizer", problems)
    if found.get("dtype") == "widest":
        found |= {"dtype": None, "widest": True}
    return OutputOptions(**found)


def read_conventions(raw: Any, problems: Problems) -> Conventions:
    """Read the section `conventions`."""
    return Conventions(**read_section(CONVENTIONS, raw, "conventions", problems))


def read_tokenizer(value: Any, where: str, problems: Problems) -> TokenizerOptions | None:
    """Read `base`, `union`, a model, or a mapping."""
    if isinstance(value, str):
        return TokenizerOptions(value)
    if not isinstance(value, dict):
        problems.add(where, f"expected base, union, a model or a mapping, got {kind_of(value)}")
        return None
    found = read_section(TOKENIZER, value, where, problems)
    tokens: dict[str, TokenRow] = {}
    with problems.collect():
        for token, row in expect(value.get("tokens") or {}, dict, f"{where}.tokens").items():
            with problems.collect():
                tokens[str(token)] = _read_token_row(row, f"{where}.tokens[{str(token)!r}]", problems)
    if "terms" in found and value.get("absent") != "omp":
        problems.add(f"{where}.terms", "is the number of rows that `absent: omp` combines; no other rule has it")
    return TokenizerOptions(**found, tokens=tokens)


def _read_token_row(raw: Any, where: str, problems: Problems) -> TokenRow:
    raw = expect({} if raw is None else raw, dict, where)
    force = read_section(TOKEN, raw, where, problems).get("force", False)
    source = raw.get("source")
    if source is None or isinstance(source, str):
        return TokenRow(model=source, force=force)
    row = read_section(TOKEN_SOURCE, expect(source, dict, f"{where}.source"), f"{where}.source", problems)
    if source.get("kind") == "zero":
        return TokenRow(zero=True, force=force)
    if source.get("kind") != "model_token":
        raise RecipeError(f"{where}.source.kind: expected 'zero' or 'model_token', got {kind_of(source.get('kind'))}")
    if (source.get("token") is None) == (source.get("token_id") is None):
        raise RecipeError(f"{where}.source: expected either token or token_id")
    model = expect(source.get("model"), str, f"{where}.source.model")
    return TokenRow(model, row.get("token", row.get("token_id")), force=force)
