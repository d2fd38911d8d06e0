"""The vocabulary of a tokenizer, read from its files without the libraries that run it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from merganser.checkpoints.json_file import read_object
from merganser.errors import CheckpointError, reading


@dataclass(frozen=True)
class Tokens:
    """Token -> id, and the records of the tokens added to the model's own."""

    ids: Mapping[str, int]
    added: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    #: Whether tokens can be appended to it (a `tokenizer.json`).
    extensible: bool = False


def read_tokens(directory: Path | None) -> Tokens | None:
    """The vocabulary in a model directory: tokenizer.json, vocab.json or vocab.txt; None without any of them."""
    if directory is None:
        return None
    if (directory / "tokenizer.json").is_file():
        return _from_tokenizer_json(directory / "tokenizer.json")
    added = read_object(directory / "added_tokens.json") if (directory / "added_tokens.json").is_file() else {}
    if (directory / "vocab.json").is_file():
        return Tokens(read_object(directory / "vocab.json") | added)
    if (directory / "vocab.txt").is_file():
        file = directory / "vocab.txt"
        with reading(file, CheckpointError), file.open(encoding="utf-8") as lines:  # splitlines would cut in tokens
            return Tokens({line.rstrip("\n"): i for i, line in enumerate(lines)} | added)
    return None


def _from_tokenizer_json(file: Path) -> Tokens:
    data = read_object(file)
    try:
        vocabulary = data["model"]["vocab"]
        if isinstance(vocabulary, list):  # Unigram: [piece, score], in order of id
            ids = {piece: i for i, (piece, _) in enumerate(vocabulary)}
        else:
            ids = dict(vocabulary)
        added = {record["content"]: record for record in data.get("added_tokens") or []}
        ids |= {content: record["id"] for content, record in added.items()}
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file}: not a tokenizer: {type(error).__name__} {error}") from None
    return Tokens(ids, added, extensible=True)


def added_token(content: str, token_id: int, like: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The record of an added token; an ordinary token of another model matches whole words only."""
    plain = {"single_word": like is None, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    return {"id": token_id, "content": content} | {key: (like or plain).get(key, plain[key]) for key in plain}


def extended(tokenizer: Mapping[str, Any], added: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """A tokenizer.json with more added tokens, whose ids follow the ones it has."""
    return {**tokenizer, "added_tokens": [*(tokenizer.get("added_tokens") or []), *(dict(record) for record in added)]}
