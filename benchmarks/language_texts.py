"""Short English texts of several kinds, and the perplexity of a language model on them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from merganser.strict_json import parse_json

#: Word problems, film reviews, requests to an assistant.
KINDS = ("gsm8k", "mr", "clinc150")


def texts(data: Path, kind: str, part: str, count: int) -> list[str]:
    """The first texts of a kind, of its training or test part."""
    if kind == "gsm8k":
        lines = (data / f"gsm8k_{part}.jsonl").read_text(encoding="utf-8").splitlines()[:count]
        return [parse_json(line)["question"] for line in lines]
    lines = (data / "text" / f"{kind}.{part}.tsv").read_text(encoding="utf-8").splitlines()
    step = max(1, len(lines) // count)  # some files are in the order of their labels
    return [line.split("\t", 1)[1].strip() for line in lines[::step][:count]]


@torch.inference_mode()
def perplexity(network: Any, tokenizer: Any, chosen: Sequence[str], longest: int = 256) -> tuple[float, float]:
    """Perplexity per token, and bits per byte."""
    loss, tokens, size = 0.0, 0, 0
    for text in chosen:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"][:longest]
        first = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        batch = torch.tensor([first + ids])
        scores = network(batch).logits[0, :-1].log_softmax(-1)
        loss -= scores.gather(1, batch[0, 1:, None]).sum().item()
        tokens += batch.shape[1] - 1
        size += len(tokenizer.decode(ids).encode())
    return math.exp(loss / tokens), loss / size / math.log(2)
