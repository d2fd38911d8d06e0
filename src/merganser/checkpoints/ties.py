"""Heads that a checkpoint does not store because they are tied to its embedding."""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from typing import Any

from merganser.checkpoints.base import Checkpoint, views
from merganser.checkpoints.json_file import read_config
from merganser.errors import CheckpointError

_TIE = "tie_word_embeddings"
_HEAD = re.compile(r"(^|\.)(lm_head|embed_out)\.weight$")
#: Embeddings whose head has a known name: beside the decoder, at the top of the model.
_PLAIN = re.compile(r"((model|transformer|gpt_neox|model\.decoder)\.)?(embed_tokens|wte|embed_in)\.weight")
_EMBEDDING = re.compile(r"(^|\.)(embed_tokens|wte|embed_in|word_embeddings|tok_embeddings|shared)\.weight$")
#: Entries compared at a time to tell whether a head repeats its embedding.
_SAMPLE = 512
_WITH_HEAD = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForMaskedLM", "ForPreTraining", "Seq2SeqLM")


def ties(checkpoint: Checkpoint) -> dict[str, str]:
    """Return tied names -> stored names: the checkpoint's aliases, and a head that its config ties to the embedding."""
    found = dict(checkpoint.aliases())
    config = read_config(checkpoint.directory)
    embeddings = [name for name in checkpoint.names() if _PLAIN.fullmatch(name)]
    if len(embeddings) == 1 and _has_tied_head(config):
        stored = _heads(checkpoint)
        implied = "embed_out.weight" if embeddings[0].endswith("embed_in.weight") else "lm_head.weight"
        # A stored head that repeats the embedding is ignored if the config ties them.
        repeated = [] if own_head(checkpoint) else [h for h in stored if h not in found and config.get(_TIE) is True]
        found |= dict.fromkeys(repeated if stored else [implied], embeddings[0])
    return found


def own_head(checkpoint: Checkpoint) -> str | None:
    """Return the stored head of a checkpoint, unless it repeats the embedding that the config ties it to."""
    head = next((name for name in checkpoint.names() if _HEAD.search(name)), None)
    if any(head not in view.source for view in views(checkpoint)):
        return head  # an expert of a library has one that its base does not have
    tied = head is not None and _tie(read_config(checkpoint.directory)) is True
    return head if not tied or contradicts_tie(checkpoint) else None


def says_tied(checkpoint: Checkpoint) -> bool:
    """Return whether the config of a decoder ties the head to the embedding, or does so for want of a stored head."""
    config = read_config(checkpoint.directory)
    return not config.get("is_encoder_decoder") and (_tie(config) is True or bool(separable_heads(checkpoint)))


def contradicts_tie(checkpoint: Checkpoint) -> bool:
    """Return whether the config ties the head to the embedding, but both are stored with different values.

    transformers 5 then loads both; transformers 4 ignored the head. Only a sample of the values is compared.
    """
    for view in views(checkpoint):
        checkpoint = view.source
    config = read_config(checkpoint.directory)
    heads = [name for name in checkpoint.names() if _HEAD.search(name)]
    embeddings = [name for name in checkpoint.names() if _EMBEDDING.search(name)]
    if _tie(config) is not True or config.get("is_encoder_decoder") or len(heads) != 1 or len(embeddings) != 1:
        return False
    specs = [checkpoint.spec(name) for name in (heads[0], embeddings[0])]
    if specs[0] != specs[1]:
        return False
    places = {0, max(0, (specs[0].numel - _SAMPLE) // 2), max(0, specs[0].numel - _SAMPLE)}
    return any(len({checkpoint.peek(name, first, _SAMPLE) for name in (*heads, *embeddings)}) > 1 for first in places)


def _heads(checkpoint: Checkpoint) -> list[str]:
    return [name for name in (*checkpoint.names(), *checkpoint.aliases()) if _HEAD.search(name)]


def _has_tied_head(config: Mapping[str, Any]) -> bool:
    """Return whether the class of a model has a head and nothing indicates that it is untied."""
    tied = _tie(config)
    classes = config.get("architectures")
    if not isinstance(classes, list) or not classes:
        return tied is True
    return tied is not False and any(isinstance(each, str) and each.endswith(_WITH_HEAD) for each in classes)


def _tie(config: Mapping[str, Any]) -> Any:
    inner = config.get("text_config")
    return config.get(_TIE, inner.get(_TIE) if isinstance(inner, dict) else None)


def check_separable(checkpoint: Checkpoint, tied: str, stored: str, where: str) -> None:
    """Refuse separate weights for a tied name that models would not load: no head, or one whose decoder scales the
    input of a tied head.
    """
    config = read_config(checkpoint.directory)
    if config and (not _HEAD.search(tied) or config.get("is_encoder_decoder")):
        raise _explain_inseparable(checkpoint, stored, repr(tied), where)


def check_head_is_known(checkpoint: Checkpoint, stored: str, where: str) -> None:
    """Refuse to change an embedding that is tied to a head of unknown name."""
    if _EMBEDDING.search(stored) and not _heads(checkpoint) and _has_tied_head(read_config(checkpoint.directory)):
        raise _explain_inseparable(checkpoint, stored, "its head", where)


def _explain_inseparable(checkpoint: Checkpoint, stored: str, tied: str, where: str) -> CheckpointError:
    return CheckpointError(
        f"{where}: trains {stored!r}, which {checkpoint.label} also uses as {tied}; merganser cannot store them "
        "separately, so merge the adapter with peft first"
    )


def separable_heads(checkpoint: Checkpoint) -> Set[str]:
    """Return the names of the head that the config of a decoder ties to the embedding."""
    config = read_config(checkpoint.directory)
    tied = {} if not config or config.get("is_encoder_decoder") else ties(checkpoint)
    return {name for name in tied if _HEAD.search(name)}


def separates_head(checkpoint: Checkpoint) -> bool:
    """Return whether an adapter gives a separate head to a base whose embedding was its head."""
    return any(view.untied for view in views(checkpoint))


def untie_config(config: Mapping[str, Any]) -> list[tuple[list[str], Any]]:
    """Return the edits of a config for a head with its own weights."""
    inner = [[key, _TIE] for key, section in config.items() if isinstance(section, dict) and section.get(_TIE)]
    return [([_TIE], False), *((path, False) for path in inner)] if config else []
