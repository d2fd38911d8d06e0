"""Match tokens of two tokenizers by the bytes they represent, not by their spelling."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache

from merganser.checkpoints.tokenizer import Tokens

#: The bytes of an ordinary token, or the identity of a special one.
TokenKey = bytes | tuple[str, str]
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
#: Alternative roles for a special token whose role the other tokenizer lacks.
_KIN = {"cls": "bos", "bos": "cls", "sep": "eos", "eos": "sep"}


def match_tokens(target: Tokens, own: Tokens) -> dict[str, str]:
    """Match the tokens of one vocabulary with those of another.

    An ordinary token matches one that represents the same bytes: `Ġthe` (byte-level BPE), `▁the` (SentencePiece) and
    `the` (WordPiece, where later pieces of a word are `##the`) are all `" the"`, and `Ċ` is `<0x0A>`. A special token
    matches the same text, or else the special token with the same role (bos, eos, unk, pad, cls, sep, mask). A byte
    token that repeats an ordinary one (`<0x41>` beside `A`) matches only its own spelling: with the same row twice, a
    head would split the probability of `A` between both.

    Args:
        target: The vocabulary whose tokens to match.
        own: The vocabulary to match them with.

    Returns:
        Token of `target` -> token of `own`, for those that have a match.

    Example:
        >>> match_tokens(Tokens({"Ġthe": 5}, spelling="byte_level"), Tokens({"▁the": 9}, spelling="metaspace"))
        {'Ġthe': '▁the'}
    """
    known: dict[TokenKey, str] = {}
    for token, key in _keys(own):
        if key not in known or _BYTE.fullmatch(known[key]):
            known[key] = token
    roles = {role: token for role, token in own.roles.items() if token in own.ids}
    found = {}
    ordinary = {key for token, key in _keys(target) if not _BYTE.fullmatch(token)}
    for token, key in _keys(target):
        same = token if token in own.ids and _key(token, own) == key else known.get(key)
        if same != token and _BYTE.fullmatch(token) and key in ordinary:
            continue
        if same is None and isinstance(key, tuple):
            mine = [role for role, content in target.roles.items() if content == token]
            same = next((roles[r] for r in (*mine, *(_KIN.get(r, "") for r in mine)) if r in roles), None)
        if same is not None:
            found[token] = same
    return found


def _keys(tokens: Tokens) -> Iterator[tuple[str, TokenKey]]:
    return ((token, _key(token, tokens)) for token in tokens.ids)


def _key(token: str, tokens: Tokens) -> TokenKey:
    if token in tokens.roles.values() or tokens.added.get(token, {}).get("special"):
        return ("special", token)
    return token.encode() if token in tokens.added else spell_bytes(token, tokens.spelling)


def spell_bytes(token: str, spelling: str) -> bytes:
    """Return the bytes of an ordinary token, in a text where words are preceded by a space."""
    if spelling == "byte_level":
        table = _byte_letters()
        return bytes(table[c] for c in token) if all(c in table for c in token) else token.encode()
    if spelling == "metaspace":
        byte = _BYTE.fullmatch(token)
        return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode()
    if spelling == "wordpiece":
        if token.startswith("##"):
            return token[2:].encode()
        return f" {token}".encode() if token.isalnum() and not _is_ideograph(token) else token.encode()
    return token.encode()


def spell(data: bytes, spelling: str) -> str | None:
    """Return how a tokenizer spells bytes before it splits them into tokens; None if it cannot."""
    if spelling == "byte_level":
        letters = {byte: letter for letter, byte in _byte_letters().items()}
        return "".join(letters[byte] for byte in data)
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return None
    if spelling == "wordpiece":
        return text[1:] if text.startswith(" ") else f"##{text}"
    return text.replace(" ", "▁") if spelling == "metaspace" else text


@cache
def _byte_letters() -> Mapping[str, int]:
    """Return GPT-2's letters for bytes: printable bytes map to themselves, the others to U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


def _is_ideograph(token: str) -> bool:
    """Return whether WordPiece separates the characters of a token, so that no space precedes them."""
    return any(0x3400 <= ord(c) <= 0x9FFF or 0xF900 <= ord(c) <= 0xFAFF or 0x20000 <= ord(c) <= 0x2FA1F for c in token)
