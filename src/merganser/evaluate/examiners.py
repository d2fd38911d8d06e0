"""Examiners for `transformers` models: classification, multiple choice, perplexity, or a custom function.

They are frozen records of where the questions are and how to ask them; each process reads them, and its tokenizer, on
first use. Every examiner accepts a JSON-lines or tab-separated file, or a list of mappings. `generation.py` has those
that read what a model writes; `KINDS` lists all.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from merganser.errors import InputError
from merganser.evaluate.endpoints import Server
from merganser.evaluate.generation import ExactMatch, Generation, LetterChoice
from merganser.evaluate.judges import Judged
from merganser.evaluate.likelihoods import TokenPair, common_length, require_finite, score_continuations
from merganser.evaluate.prompts import Prompted, check_prompt
from merganser.evaluate.questions import (
    SCORE,
    Asked,
    Direction,
    Measures,
    read_index,
    read_options,
    tokenizer_at,
)
from merganser.evaluate.records import Placed
from merganser.evaluate.references import import_function
from merganser.evaluate.sampling import batches_by_length


@dataclass(frozen=True)
class Function:
    """`package.module:name`, called with (model, items); returns answers, or measures by name. `count` items.

    A function with a parameter `tokenizer` also gets the tokenizer.
    """

    reference: str
    count: int
    tokenizer: str = ""

    def __len__(self) -> int:
        return self.count

    def __call__(self, model: nn.Module, items: Sequence[int]) -> Mapping[str, Sequence[float]]:
        function, options = import_function(self.reference), {}
        if "tokenizer" in inspect.signature(function).parameters:
            if not self.tokenizer:
                raise InputError(f"{self.reference}: needs a tokenizer, but none is known; set model.tokenizer")
            options["tokenizer"] = tokenizer_at(self.tokenizer)
        found = function(model, items, **options)
        if isinstance(found, Mapping) and not all(isinstance(key, str) for key in found):
            raise InputError(f"{self.reference}: expected a list of answers, or lists by the names of measures")
        return found if isinstance(found, Mapping) else {SCORE: found}


@dataclass(frozen=True)
class Classification(Asked):
    """`text` and `label` (the index of the class); right if the largest logit is the label's."""

    needed: ClassVar[tuple[str, ...]] = ("label", "text")

    def validate(self, placed: Placed) -> dict[str, Any]:
        return placed.record | {"label": read_index(placed, "label"), "place": placed.place}

    def choices(self, model: nn.Module, items: Sequence[int]) -> list[int]:
        """Return the class that the model chooses for every item."""
        found: list[int] = []
        for records in self.batches(items):
            logits = require_finite(model(**self.encode([str(r["text"]) for r in records], model)).logits)
            if logits.dim() != 2:
                raise InputError(
                    f"{type(model).__name__}: kind classification asks a sequence classifier, which it is not"
                )
            for record in records:
                if record["label"] >= logits.shape[-1]:
                    raise InputError(
                        f"{record['place']}: the label {record['label']} is not one of the model's {logits.shape[-1]} "
                        "classes, which count from 0"
                    )
            found += logits.argmax(-1).tolist()
        return found

    def __call__(self, model: nn.Module, items: Sequence[int]) -> Measures:
        chosen = self.choices(model, items)
        return {SCORE: [float(self.records[i]["label"] == c) for i, c in zip(items, chosen, strict=True)]}


@dataclass(frozen=True)
class MultipleChoice(Prompted):
    """`question`, `options` and `answer` (an index): right if the answer has the highest log-likelihood of all options
    after the prompt, per character of the option with `normalize`.

    Also measures `soft`, the probability of the answer among the options, softmax(ℓ/`temperature`) of the
    log-likelihoods ℓ, which distinguishes candidates with fewer items than right and wrong do. `temperatures.py` fits
    the temperature.
    """

    normalize: bool = True
    temperature: float = 1.0

    needed: ClassVar[tuple[str, ...]] = ("question", "options", "answer")

    @property
    def measures(self) -> tuple[str, ...]:
        return ("soft",)

    @property
    def directions(self) -> Mapping[str, Direction]:
        return {SCORE: "higher", "soft": "higher"}

    def validate(self, placed: Placed) -> dict[str, Any]:
        if not self.temperature > 0:
            raise InputError(f"temperature: {self.temperature}; a number above 0")
        options = read_options(placed)
        check_prompt(self.prompt, placed)
        return placed.record | {"options": options, "answer": read_index(placed, "answer", len(options))}

    def target(self, record: Mapping[str, Any]) -> str:
        return str(record["options"][record["answer"]])

    def option_logs(self, model: nn.Module | Server, items: Sequence[int]) -> list[Tensor]:
        """Return the log-likelihoods of every item's options, in float64."""
        records = [self.records[item] for item in items]
        if isinstance(model, Server):
            if self.chat:
                raise InputError("chat: a server cannot score options within its chat template; use kind choice")
            logs = iter(model.score([(self.ask(r), f" {option}") for r in records for option in r["options"]]))
        else:
            found = score_continuations(model, self._tokenize_pairs(model, items), self.batch)
            logs = iter([each.log for each in found])
        return [torch.tensor([next(logs) for _ in record["options"]], dtype=torch.float64) for record in records]

    def choices(self, model: nn.Module | Server, items: Sequence[int]) -> list[int]:
        """Return the option that the model chooses for every item."""
        logs = self.option_logs(model, items)
        return [self._choice(self.records[item], own) for item, own in zip(items, logs, strict=True)]

    def _choice(self, record: Mapping[str, Any], logs: Tensor) -> int:
        lengths = torch.tensor([max(len(option), 1) for option in record["options"]])
        return int((logs / lengths if self.normalize else logs).argmax())

    def __call__(self, model: nn.Module | Server, items: Sequence[int]) -> Measures:
        measures: Measures = {SCORE: [], "soft": []}
        for item, logs in zip(items, self.option_logs(model, items), strict=True):
            record = self.records[item]
            measures[SCORE].append(float(self._choice(record, logs) == record["answer"]))
            measures["soft"].append(float(torch.softmax(logs / self.temperature, 0)[record["answer"]]))
        return measures

    @cached_property
    def _tokenized(self) -> dict[tuple[int, int, bool], list[TokenPair]]:
        return {}

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in super().__getstate__().items() if k != "_tokenized"}

    def _tokenize_pairs(self, model: nn.Module, items: Sequence[int]) -> list[TokenPair]:
        """Return the tokens of items, which are the same for all models of one kind and are made once."""
        decoding = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
        limit, known = self.limit(model), self._tokenized
        for item in items:
            if (item, limit, decoding) not in known:
                known[item, limit, decoding] = self._tokenize_options(model, item, self.records[item])
        return [pair for item in items for pair in known[item, limit, decoding]]

    def _tokenize_options(self, model: nn.Module, item: int, record: Mapping[str, Any]) -> list[TokenPair]:
        """Return the tokens of the prompt and of each option after it."""
        prompt = self.ask(record)
        if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
            start, *options = self.tokens([prompt, *record["options"]], model)
            return [(start, option) for option in options]
        texts = [prompt if self.chat else f"{prompt} " for _ in record["options"]]
        texts = [f"{text}{option}" for text, option in zip(texts, record["options"], strict=True)]
        tokenizer = tokenizer_at(self.tokenizer)
        start, *wholes = tokenizer([prompt, *texts], add_special_tokens=not self.chat, verbose=False)["input_ids"]
        # A tokenizer may join the end of the prompt with the option; the common part belongs to the prompt.
        sizes = [len(tokens) - common_length(start, tokens) for tokens in wholes]
        # The logits of a token predict the next one, so an option needs a token before it.
        if (longest := max(sizes)) >= (limit := self.limit(model)):
            raise InputError(
                f"record {item}: an option has {longest} tokens and needs one of the prompt before it, which is more "
                f"than the {limit} of a sequence; raise max_length if the model reads more"
            )
        if max(map(len, wholes)) > limit:
            wholes = self.tokens(texts, model)
        return [(whole[:-size], whole[-size:]) for whole, size in zip(wholes, sizes, strict=True)]


@dataclass(frozen=True)
class Perplexity(Asked):
    """`text`: its mean negative log-likelihood per token, to be minimised (its exponential is the perplexity)."""

    @property
    def directions(self) -> Mapping[str, Direction]:
        return {SCORE: "lower"}

    def validate(self, placed: Placed) -> dict[str, Any]:
        if not str(placed.record["text"]).strip():
            raise InputError(f"{placed.place}: the text is empty")
        return placed.record

    def __call__(self, model: nn.Module, items: Sequence[int]) -> Measures:
        texts = [str(self.records[item]["text"]) for item in items]
        scores = [0.0] * len(texts)
        for chosen in batches_by_length([len(text) for text in texts], self.batch):
            batch = self.encode([texts[n] for n in chosen], model)
            logs = _score_tokens(model(**batch).logits, batch["input_ids"])
            mask = batch["attention_mask"][:, 1:].to(logs.dtype)
            found = (-(logs * mask).sum(1) / mask.sum(1).clamp_min(1)).tolist()
            for number, value in zip(chosen, found, strict=True):
                scores[number] = value
        return {SCORE: scores}


def embeddings(model: nn.Module, examiner: Asked, items: Sequence[int]) -> Tensor:
    """Return the mean over tokens of the last hidden state, one row per item, for representation clustering."""
    rows = []
    for records in examiner.batches(items):
        texts = [str(r.get("question", r.get("text", ""))) for r in records]
        batch = examiner.encode(texts, model)
        hidden = model(**batch, output_hidden_states=True).hidden_states[-1].double()
        mask = batch["attention_mask"][:, :, None].to(hidden)
        rows.append((hidden * mask).sum(1) / mask.sum(1))
    return torch.cat(rows).cpu()


def _score_tokens(logits: Tensor, ids: Tensor) -> Tensor:
    """Return log p of every token after the first, given those before it."""
    found: Tensor = torch.log_softmax(require_finite(logits)[:, :-1].float(), -1).gather(-1, ids[:, 1:, None])[..., 0]
    return found


KINDS: Mapping[str, type[Asked]] = {
    "classification": Classification,
    "multiple-choice": MultipleChoice,
    "choice": LetterChoice,
    "generation": Generation,
    "exact-match": ExactMatch,
    "judged": Judged,
    "perplexity": Perplexity,
}
