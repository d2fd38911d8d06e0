"""The vocabulary of a tokenizer, read from its files without tokenizer libraries."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from merganser.checkpoints.json_file import read_config, read_object
from merganser.errors import CheckpointError, reading

ROLES = ("bos", "eos", "unk", "pad", "cls", "sep", "mask")
_FILES = (
    "tokenizer.json",
    "vocab.json",
    "vocab.txt",
    "added_tokens.json",
    "config.json",
    "special_tokens_map.json",
    "tokenizer_config.json",
)
#: Ids up to this far beyond twice the vocabulary size count as gaps, not as errors.
_SPARE_IDS = 1 << 16


@dataclass(frozen=True)
class Tokens:
    """A mapping of token to id, and the records of added tokens."""

    ids: Mapping[str, int]
    added: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    #: Whether tokens can be added (to a `tokenizer.json`).
    extensible: bool = False
    #: How tokens are spelled: byte_level (`Ġthe`), metaspace (`▁the`), wordpiece (`the`, `##the`) or plain.
    spelling: str = "plain"
    #: The special token of each role: bos, eos, unk, pad, cls, sep, mask.
    roles: Mapping[str, str] = field(default_factory=dict)


def read_tokens(directory: Path | None) -> Tokens | None:
    """Read the vocabulary in a model directory from tokenizer.json, vocab.json or vocab.txt; None without these.

    Raises:
        CheckpointError: If a file is damaged, or an id is negative, used twice, or far beyond the vocabulary.
    """
    return None if directory is None else _read_tokens(directory, tokenizer_stamp(directory))


def tokenizer_stamp(directory: Path) -> tuple[tuple[str, int, int, int], ...]:
    """Return a stamp that changes when one of the files does."""
    there = [directory / name for name in _FILES if (directory / name).is_file()]
    return tuple((path.name, (s := path.stat()).st_ino, s.st_size, s.st_mtime_ns) for path in there)


@lru_cache(maxsize=8)  # searches plan the same models again and again
def _read_tokens(directory: Path, stamp: tuple[tuple[str, int, int, int], ...]) -> Tokens | None:
    if (directory / "tokenizer.json").is_file():
        file = directory / "tokenizer.json"
        tokens = _from_tokenizer_json(file)
    elif (directory / "vocab.json").is_file():
        file = directory / "vocab.json"
        ids = read_object(file, finite=True) | _read_added(directory)
        tokens = Tokens(ids, spelling="byte_level" if any("Ġ" in token for token in ids) else "metaspace")
    elif (directory / "vocab.txt").is_file():
        file = directory / "vocab.txt"
        with (
            reading(file, CheckpointError),
            file.open(encoding="utf-8") as lines,
        ):  # splitlines would split inside tokens
            ids = {line.rstrip("\n"): i for i, line in enumerate(lines)} | _read_added(directory)
        tokens = Tokens(ids, spelling="wordpiece")
    else:
        return None
    _check_ids(tokens.ids, file, read_config(directory))
    return replace(tokens, roles=_read_roles(directory))


def _read_roles(directory: Path) -> dict[str, str]:
    """Return the special tokens in the settings of a tokenizer, each given as text or record."""
    found = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        settings = read_object(directory / name) if (directory / name).is_file() else {}
        for role in ROLES:
            token = settings.get(f"{role}_token")
            content = token.get("content") if isinstance(token, dict) else token
            if isinstance(content, str):
                found[role] = content
    return found


def _read_added(directory: Path) -> dict[str, Any]:
    file = directory / "added_tokens.json"
    return read_object(file, finite=True) if file.is_file() else {}


def _check_ids(ids: Mapping[str, Any], file: Path, config: Mapping[str, Any]) -> None:
    """Refuse ids that cannot be row numbers: gaps are allowed, but not ids far beyond the known size."""
    sizes = [each.get("vocab_size") for each in (config, *config.values()) if isinstance(each, dict)]
    bound = 2 * max(len(ids), *(size for size in sizes if type(size) is int), 0) + _SPARE_IDS
    owners: dict[int, str] = {}
    for token, number in ids.items():
        if not isinstance(token, str) or type(number) is not int:
            raise CheckpointError(
                f"{file}: the token {token!r} has the id {number!r}; expected a text and a whole number"
            )
        if not 0 <= number < bound:
            raise CheckpointError(
                f"{file}: {token!r} has the id {number}, which is not a row of a vocabulary of {len(ids)} tokens"
            )
        if owners.setdefault(number, token) != token:
            raise CheckpointError(f"{file}: {owners[number]!r} and {token!r} have the same id {number}")


def _from_tokenizer_json(file: Path) -> Tokens:
    data = read_object(file, finite=True)
    try:
        vocabulary = data["model"]["vocab"]
        if isinstance(vocabulary, list):  # Unigram: [piece, score], in order of id
            ids = {piece: i for i, (piece, _) in enumerate(vocabulary)}
        else:
            ids = dict(vocabulary)
        added = {record["content"]: dict(record) for record in data.get("added_tokens") or []}
        ids |= {content: record["id"] for content, record in added.items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file}: not a tokenizer: {type(error).__name__} {error}") from None
    return Tokens(ids, added, extensible=True, spelling=_read_spelling(data))


def _read_spelling(tokenizer: Mapping[str, Any]) -> str:
    """Return how the tokens of a tokenizer.json are spelled, according to its steps."""
    if tokenizer["model"].get("type") == "WordPiece":
        return "wordpiece"
    steps = json.dumps([tokenizer.get(part) for part in ("normalizer", "pre_tokenizer", "decoder")], ensure_ascii=False)
    if '"ByteLevel"' in steps:
        return "byte_level"
    return "metaspace" if "▁" in steps or '"Metaspace"' in steps or tokenizer["model"].get("byte_fallback") else "plain"


def make_added_token(content: str, token_id: int, like: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the record of an added token; an ordinary token of another model matches only whole words."""
    plain = {"single_word": like is None, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    return {"id": token_id, "content": content} | {key: (like or plain).get(key, plain[key]) for key in plain}


def extend_tokenizer(tokenizer: Mapping[str, Any], added: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a tokenizer.json with more added tokens, whose ids follow the existing ones."""
    return {**tokenizer, "added_tokens": [*(tokenizer.get("added_tokens") or []), *(dict(record) for record in added)]}
