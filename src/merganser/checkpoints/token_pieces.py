"""Split the bytes of another tokenizer's tokens into a tokenizer's own pieces."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from merganser.checkpoints.json_file import read_object
from merganser.checkpoints.token_bytes import spell
from merganser.checkpoints.tokenizer import Tokens
from merganser.errors import CheckpointError, require

_STEPS = ("normalizer", "pre_tokenizer", "post_processor", "decoder", "truncation", "padding")


def cut_into_pieces(directory: Path, tokens: Tokens, texts: Sequence[bytes]) -> list[list[int]]:
    """Split texts with only the model of a tokenizer: no normaliser, no pre-tokenizer, no special tokens.

    Args:
        directory: The directory of `tokenizer.json`.
        tokens: Its vocabulary.
        texts: The bytes of each text, words preceded by a space.

    Returns:
        The ids of the pieces of every text; empty for a text that cannot be spelled.

    Raises:
        CheckpointError: If there is no `tokenizer.json`.

    Example:
        >>> cut_into_pieces(Path("model"), read_tokens(Path("model")), [b" merging"])
        [[5366, 292]]
    """
    if not (directory / "tokenizer.json").is_file():
        raise CheckpointError(
            f"{directory}: no tokenizer.json to split tokens with; save its tokenizer as a fast one with "
            "transformers first"
        )
    spelt = [spell(text, tokens.spelling) for text in texts]
    if tokens.spelling == "wordpiece":
        found = [_match_longest(text or "", tokens) for text in spelt]
    else:
        data = read_object(directory / "tokenizer.json")
        bare = {**data, **dict.fromkeys(_STEPS), "added_tokens": []}
        runner = require("tokenizers", "hf").Tokenizer.from_str(json.dumps(bare))
        found = [encoding.ids for encoding in runner.encode_batch([text or "" for text in spelt])]
    unknown = tokens.ids.get(tokens.roles.get("unk", ""))
    return [
        _find_byte_tokens(text, tokens) if not pieces or unknown in pieces else pieces
        for text, pieces in zip(texts, found, strict=True)
    ]


def _find_byte_tokens(text: bytes, tokens: Tokens) -> list[int]:
    """Return the tokens of the single bytes; empty unless the vocabulary has them all."""
    found = [tokens.ids.get(f"<0x{byte:02X}>") for byte in text]
    return [] if None in found else [piece for piece in found if piece is not None]


def _match_longest(word: str, tokens: Tokens) -> list[int]:
    """Split as WordPiece does: the longest known prefix, then the longest continuation, and so on."""
    found, prefix = [], "##" if word.startswith("##") else ""
    rest = word.removeprefix("##")
    while rest:
        end = next((n for n in range(len(rest), 0, -1) if prefix + rest[:n] in tokens.ids), 0)
        if not end:
            return []
        found.append(tokens.ids[prefix + rest[:end]])
        prefix, rest = "##", rest[end:]
    return found
