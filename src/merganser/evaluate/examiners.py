"""Examiners for `transformers` models: classification, multiple choice, perplexity; or a function of yours.

Frozen records of where the questions are and how to ask them; each process reads them, and its tokenizer, on first use.
Every examiner takes a JSON-lines or tab-separated file, or a list of mappings. `generation.py` has those that read
what a model writes; `KINDS` names them all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from merganser.errors import InputError
from merganser.evaluate.generation import ExactMatch, Generation, LetterChoice
from merganser.evaluate.questions import (
    SCORE,
    Asked,
    Direction,
    Measures,
    check_prompt,
    fill,
    read_index,
    read_options,
    require_finite,
    tokenizer_at,
)
from merganser.evaluate.records import Placed
from merganser.evaluate.references import imported


@dataclass(frozen=True)
class Function:
    """`package.module:name`, called with (model, items); returns answers, or measures by name. `count` items."""

    reference: str
    count: int

    def __len__(self) -> int:
        return self.count

    def __call__(self, model: nn.Module, items: Sequence[int]) -> Mapping[str, Sequence[float]]:
        found = imported(self.reference)(model, items)
        if isinstance(found, Mapping) and not all(isinstance(key, str) for key in found):
            raise InputError(f"{self.reference}: expected a list of answers, or lists by the names of measures")
        return found if isinstance(found, Mapping) else {SCORE: found}


@dataclass(frozen=True)
class Classification(Asked):
    """`text` and `label` (the index of the class); right when the largest logit is the label's."""

    needed: ClassVar[tuple[str, ...]] = ("label", "text")

    def checked(self, placed: Placed) -> dict[str, Any]:
        return placed.record | {"label": read_index(placed, "label"), "place": placed.place}

    def __call__(self, model: nn.Module, items: Sequence[int]) -> Measures:
        scores: list[float] = []
        for records in self.chosen(items):
            logits = require_finite(model(**self.encoded([str(r["text"]) for r in records], model)).logits)
            for record in records:
                if record["label"] >= logits.shape[-1]:
                    raise InputError(
                        f"{record['place']}: the label {record['label']} is none of the model's {logits.shape[-1]} "
                        "classes, which count from 0"
                    )
            labels = torch.tensor([r["label"] for r in records], device=logits.device)
            scores += (logits.argmax(-1) == labels).double().tolist()
        return {SCORE: scores}


@dataclass(frozen=True)
class MultipleChoice(Asked):
    """`question`, `options` and `answer` (an index): right when the answer has the highest log-likelihood of all
    options after the prompt, per character of the option with `normalize`."""

    prompt: str = "{context}Question: {question}\nAnswer:"
    normalize: bool = True

    needed: ClassVar[tuple[str, ...]] = ("question", "options", "answer")

    def checked(self, placed: Placed) -> dict[str, Any]:
        options = read_options(placed)
        check_prompt(self.prompt, placed)
        return placed.record | {"options": options, "answer": read_index(placed, "answer", len(options))}

    def __call__(self, model: nn.Module, items: Sequence[int]) -> Measures:
        scores: list[float] = []
        for item in items:
            record = self.records[item]
            options = record["options"]
            prompt = fill(self.prompt, record)
            found: list[float] = []
            for start in range(0, len(options), self.batch):
                found += self._likelihoods(model, item, prompt, options[start : start + self.batch])
            if self.normalize:
                found = [value / max(len(option), 1) for value, option in zip(found, options, strict=True)]
            scores.append(float(max(range(len(found)), key=found.__getitem__) == record["answer"]))
        return {SCORE: scores}

    def _likelihoods(self, model: nn.Module, item: int, prompt: str, options: Sequence[str]) -> list[float]:
        texts = [f"{prompt} {option}" for option in options]
        sizes = self._sizes(prompt, texts)
        # The logits of one token say the next: an option needs one before it.
        if (longest := max(sizes)) >= (limit := self.limit(model)):
            raise InputError(
                f"record {item}: an option has {longest} tokens and needs one of the prompt before it, which is more "
                f"than the {limit} of a sequence; raise max_length if the model reads more"
            )
        batch = self.encoded(texts, model, cut="left")
        logs = _token_logs(model(**batch).logits, batch["input_ids"]).detach()
        ends = (batch["attention_mask"].sum(1) - 1).tolist()
        return [float(row[max(end - size, 0) : end].sum()) for row, end, size in zip(logs, ends, sizes, strict=True)]

    def _sizes(self, prompt: str, texts: Sequence[str]) -> list[int]:
        """Tokens of each option after the prompt."""
        start, *wholes = tokenizer_at(self.tokenizer)([prompt, *texts], verbose=False)["input_ids"]
        sizes = []
        for tokens in wholes:
            # A tokenizer may join the prompt's end with the option; what is common belongs to the prompt.
            common = next((i for i, (a, b) in enumerate(zip(start, tokens, strict=False)) if a != b), len(start))
            sizes.append(len(tokens) - common)
        return sizes


@dataclass(frozen=True)
class Perplexity(Asked):
    """`text`: its mean negative log-likelihood per token, to be minimised (its exponential is the perplexity)."""

    @property
    def directions(self) -> Mapping[str, Direction]:
        return {SCORE: "lower"}

    def checked(self, placed: Placed) -> dict[str, Any]:
        if not str(placed.record["text"]).strip():
            raise InputError(f"{placed.place}: the text is empty")
        return placed.record

    def __call__(self, model: nn.Module, items: Sequence[int]) -> Measures:
        scores: list[float] = []
        for records in self.chosen(items):
            batch = self.encoded([str(r["text"]) for r in records], model)
            logs = _token_logs(model(**batch).logits, batch["input_ids"])
            mask = batch["attention_mask"][:, 1:].to(logs.dtype)
            scores += (-(logs * mask).sum(1) / mask.sum(1).clamp_min(1)).tolist()
        return {SCORE: scores}


def embeddings(model: nn.Module, examiner: Asked, items: Sequence[int]) -> Tensor:
    """Mean over tokens of the last hidden state, one row an item: what representation clustering works on."""
    rows = []
    for records in examiner.chosen(items):
        texts = [str(r.get("question", r.get("text", ""))) for r in records]
        batch = examiner.encoded(texts, model)
        hidden = model(**batch, output_hidden_states=True).hidden_states[-1].double()
        mask = batch["attention_mask"][:, :, None].to(hidden)
        rows.append((hidden * mask).sum(1) / mask.sum(1))
    return torch.cat(rows).cpu()


def _token_logs(logits: Tensor, ids: Tensor) -> Tensor:
    """log p of every token after the first, given those before it."""
    found: Tensor = torch.log_softmax(require_finite(logits)[:, :-1].float(), -1).gather(-1, ids[:, 1:, None])[..., 0]
    return found


KINDS: Mapping[str, type[Asked]] = {
    "classification": Classification,
    "multiple-choice": MultipleChoice,
    "choice": LetterChoice,
    "generation": Generation,
    "exact-match": ExactMatch,
    "perplexity": Perplexity,
}
