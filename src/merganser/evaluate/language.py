"""Checks of models that `transformers` loads: complete weights, finite outputs, perplexity, and where to stop."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from merganser.checkpoints.json_file import read_config
from merganser.errors import MerganserError, require
from merganser.evaluate.examiners import Perplexity
from merganser.evaluate.loaders import LOADERS, hidden_progress
from merganser.evaluate.questions import SCORE
from merganser.evaluate.texts import TEXTS
from merganser.evaluate.verdicts import Check, CheckStatus

#: Perplexity relative to the worst parent's from which a model is doubtful, and from which it is broken.
DOUBTFUL, BROKEN = 1.5, 20.0
_SUFFIXES = {
    "ForCausalLM": "causal-lm",
    "LMHeadModel": "causal-lm",
    "ForSequenceClassification": "sequence-classification",
    "ForConditionalGeneration": "seq2seq-lm",
    "ForMaskedLM": "masked-lm",
    "ForTokenClassification": "token-classification",
}
#: Markers of turns in chat templates; each should be one token.
_MARKERS = re.compile(r"<\|[^|<>\s]+\|>|<(?:start|end)_of_turn>|\[/?INST\]")


@dataclass(frozen=True)
class Loaded:
    """A module in evaluation mode, the class in its config, and the completeness of its weights."""

    module: nn.Module
    kind: str
    check: Check


def kind_of_model(directory: Path | None) -> str | None:
    """Return the kind of loader for a config.json; None if `transformers` does not know it."""
    config = read_config(directory)
    if "model_type" not in config:
        return None
    names = config.get("architectures") or [""]
    return next((kind for suffix, kind in _SUFFIXES.items() if names[0].endswith(suffix)), "encoder")


def load(directory: Path, kind: str, device: str = "cpu") -> Loaded:
    """Load a model; missing weights, which would be initialised randomly, are a failure."""
    transformers = require("transformers", "hf")
    try:
        with hidden_progress(transformers):
            module, info = getattr(transformers, LOADERS[kind]).from_pretrained(
                str(directory), dtype="auto", output_loading_info=True
            )
    except Exception as error:  # loaders raise many kinds of errors
        reason = (str(error).strip().splitlines() or [""])[0]
        raise MerganserError(f"{directory}: transformers cannot load it: {type(error).__name__}: {reason}") from error
    missing, extra = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
    size = sum(parameter.numel() for parameter in module.parameters())
    check = Check("loads", "pass", f"{type(module).__name__}, {size:,} parameters")
    if missing:
        check = Check(
            "loads", "fail", f"{len(missing)} weights are missing and were initialised randomly, such as {missing[0]!r}"
        )
    elif extra:
        check = Check("loads", "warn", f"{len(extra)} weights are not used, such as {extra[0]!r}")
    return Loaded(module.eval().to(device), kind, check)


def check_outputs(loaded: Loaded, tokenizer: Any) -> Check:
    """Run one forward pass over short text."""
    batch = tokenizer(TEXTS[0], return_tensors="pt")
    batch.pop("token_type_ids", None)
    if loaded.kind == "seq2seq-lm":
        batch["decoder_input_ids"] = batch["input_ids"][:, :1]
    with torch.inference_mode():
        outputs = loaded.module(**batch.to(next(loaded.module.parameters()).device))
    tensors = [value for value in outputs.values() if isinstance(value, torch.Tensor)]
    if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors):
        return Check("outputs", "fail", "not finite on plain text")
    return Check("outputs", "pass", "finite on plain text")


def perplexity(module: nn.Module, directory: Path) -> float:
    """Return exp of the mean negative log-likelihood per token over the built-in texts."""
    examiner = Perplexity([{"text": text} for text in TEXTS], str(directory), batch=2)
    with torch.inference_mode():
        values = examiner(module, range(len(TEXTS)))[SCORE]
    return math.exp(min(700.0, sum(values) / len(values)))


def unigram_perplexity(tokenizer: Any) -> float:
    """Return exp(H), H = −Σ f log f the entropy of the built-in texts' own token frequencies f.

    This is the perplexity of a model that knows only the frequencies of tokens.
    """
    counts = Counter(token for text in TEXTS for token in tokenizer(text)["input_ids"])
    total = sum(counts.values())
    return math.exp(-math.fsum(n / total * math.log(n / total) for n in counts.values()))


def _show(perplexity: float) -> str:
    return f"{perplexity:,.0f}" if 1e4 <= perplexity < 1e15 else f"{perplexity:.4g}"


def check_perplexity(own: float, parents: Mapping[str, float], vocabulary: int, unigram: float) -> Check:
    """Compare with the worst parent, or without parents with token frequencies; no model should be worse than
    guessing among all words, unless a parent is no better.
    """
    label, worst = max(parents.items(), key=lambda item: item[1], default=("", 0.0))
    if own > vocabulary:
        guessing = f"{_show(own)}: worse than guessing among {vocabulary:,} words"
        if worst <= vocabulary or own > DOUBTFUL * worst:
            return Check("perplexity", "fail", guessing)
        return Check("perplexity", "warn", f"{guessing}, as is its parent {label} ({_show(worst)})")
    if not parents:
        if own > unigram:
            bad: CheckStatus = "fail" if own > BROKEN * unigram else "warn"
            what = f"{_show(own)} on plain English, where the frequencies of its words alone give {unigram:.4g}"
            return Check("perplexity", bad, f"{what}; compare it with its parents")
        return Check("perplexity", "pass", f"{_show(own)} (no parents to compare with)")
    status: CheckStatus = "fail" if own > BROKEN * worst else "warn" if own > DOUBTFUL * worst else "pass"
    return Check(
        "perplexity", status, f"{_show(own)}, {own / worst:.2f} times its worst parent's, {label} ({_show(worst)})"
    )


def check_vocabulary(module: Any, tokenizer: Any) -> Check:
    """Check that every token has a row of the embedding."""
    embedding = module.get_input_embeddings() if hasattr(module, "get_input_embeddings") else None
    if embedding is None:
        return Check("vocabulary", "skip", "no input embedding")
    rows, tokens = embedding.weight.shape[0], len(tokenizer)
    if tokens > rows:
        return Check("vocabulary", "fail", f"{tokens:,} tokens for {rows:,} rows of the embedding")
    return Check("vocabulary", "pass", f"{tokens:,} tokens, {rows:,} rows")


def check_end_token(module: Any, tokenizer: Any) -> Check:
    """Check that generation stops at a token that the tokenizer knows and uses as its end."""
    given = getattr(module, "generation_config", None)
    given = given if given is not None and given.eos_token_id is not None else module.config
    ids = given.eos_token_id
    ends = ids if isinstance(ids, list) else [ids] if ids is not None else []
    if not ends:
        return Check("end token", "warn", "the config names none: generation runs to its length limit")
    if any(not 0 <= end < len(tokenizer) for end in ends):
        return Check("end token", "fail", f"{ends} is outside the tokenizer's {len(tokenizer)} tokens")
    own = tokenizer.eos_token_id
    if own is not None and own not in ends:
        what = f"generation stops at {ends}, the tokenizer's end is {own} ({tokenizer.eos_token!r})"
        return Check("end token", "warn", what)
    return Check("end token", "pass", f"{tokenizer.convert_ids_to_tokens(ends)}")


def check_chat_template(tokenizer: Any, parents_have_one: bool) -> Check:
    """Check that the template renders a short conversation, and that each of its markers is one token."""
    if not tokenizer.chat_template:
        if parents_have_one:
            return Check("chat template", "warn", "none, although a parent has one")
        return Check("chat template", "skip", "none")
    talk = [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Yes."}]
    try:
        text = tokenizer.apply_chat_template(talk, tokenize=False)
    except Exception as error:  # a template is a program and can raise anything
        return Check("chat template", "fail", f"does not render: {error}")
    if "Hello?" not in text or "Yes." not in text:
        return Check("chat template", "fail", "drops the content of messages")
    for marker in dict.fromkeys(_MARKERS.findall(text)):
        if len(tokenizer(marker, add_special_tokens=False)["input_ids"]) != 1 and not marker.startswith("["):
            return Check("chat template", "warn", f"marks turns with {marker!r}, which is not one token")
    return Check("chat template", "pass", f"renders to {len(text)} characters")
