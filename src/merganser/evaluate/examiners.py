"""Examiners for `transformers` models: classification, multiple choice, generation, perplexity; or a function of yours.

Frozen records of where the questions are and how to ask them; each process reads them, and its tokenizer, on first use.
Every examiner takes a JSON-lines or tab-separated file, or a list of mappings.
"""

from __future__ import annotations

import csv
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from merganser.errors import InputError, MerganserError, did_you_mean, reading, require
from merganser.evaluate.references import imported
from merganser.strict_json import parse_json

Records = Sequence[Mapping[str, Any]]
Measures = dict[str, list[float]]
#: The measure that is a task's own.
SCORE = "score"
#: Tokens of a sequence where neither the caller nor the model asks for fewer.
LONGEST = 2048


class Examiner(Protocol):
    """Asks a model some items of one task. Returns measures by name; `score` is the task's own."""

    def __len__(self) -> int: ...

    def __call__(self, model: nn.Module, items: Sequence[int]) -> Mapping[str, Sequence[float]]: ...


def read_records(path: str | Path) -> list[dict[str, Any]]:
    """Records of a .jsonl, .json (a list) or .tsv (`label<TAB>text`, or with a header) file."""
    source = Path(path)
    with reading(source):
        text = source.read_text(encoding="utf-8")
    records: list[Any]
    if source.suffix == ".tsv":
        rows = list(csv.reader(text.splitlines(), delimiter="\t", quoting=csv.QUOTE_NONE))
        header = rows.pop(0) if rows and {"label", "text"} <= set(rows[0]) else ["label", "text"]
        records = [dict(zip(header, row, strict=False)) for row in rows]
    else:
        try:
            whole = parse_json(text) if source.suffix == ".json" else None
            records = whole if whole is not None else [parse_json(line) for line in text.splitlines() if line.strip()]
        except ValueError as error:
            raise InputError(f"{source}: not JSON{'' if source.suffix == '.json' else ' lines'}: {error}") from error
    if not isinstance(records, list) or not records or not all(isinstance(r, dict) for r in records):
        raise InputError(f"{source}: expected a list of records, one a question")
    return records


@lru_cache(maxsize=8)
def tokenizer_at(path: str) -> Any:
    """The tokenizer of a directory or hub id, padding with the end of text when it has no padding token."""
    tokenizer = require("transformers", "hf").AutoTokenizer.from_pretrained(path)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


@dataclass(frozen=True)
class Loader:
    """Builds the module that candidates are merged into: a `transformers` architecture from `path`, or a function."""

    kind: str
    path: str
    device: str = "cpu"

    def __call__(self) -> nn.Module:
        if ":" in self.kind:
            module: nn.Module = imported(self.kind)()
            return module.to(self.device)
        transformers = require("transformers", "hf")
        if self.kind not in LOADERS:
            raise InputError(
                f"unknown kind of model {self.kind!r}{did_you_mean(self.kind, LOADERS)}; or package.module:function"
            )
        found: nn.Module = getattr(transformers, LOADERS[self.kind]).from_pretrained(self.path, dtype="auto")
        return found.to(self.device)


LOADERS = {
    "causal-lm": "AutoModelForCausalLM",
    "sequence-classification": "AutoModelForSequenceClassification",
    "encoder": "AutoModel",
}


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
class Asked:
    """Questions from a file (or given), a tokenizer, and batches.

    A sequence has at most `max_length` tokens: by default as many as model and tokenizer say they read, and no more
    than `LONGEST`. Texts lose their end beyond it; prompts lose their beginning, so that the question stays.
    """

    source: str | Records
    tokenizer: str
    batch: int = 16
    max_length: int | None = None

    fields: ClassVar[tuple[str, ...]] = ("text",)

    @property
    def measures(self) -> tuple[str, ...]:
        """What is measured besides the score."""
        return ()

    @cached_property
    def records(self) -> Records:
        records = read_records(self.source) if isinstance(self.source, str) else self.source
        where = self.source if isinstance(self.source, str) else "records"
        for number, record in enumerate(records):
            for name in self.fields:
                if name not in record:
                    raise InputError(f"{where}: record {number} has no {name!r}{did_you_mean(name, map(str, record))}")
        return records

    def __len__(self) -> int:
        return len(self.records)

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k != "records"}

    def chosen(self, items: Sequence[int]) -> Iterator[Records]:
        for start in range(0, len(items), self.batch):
            yield [self.records[i] for i in items[start : start + self.batch]]

    def limit(self, model: nn.Module) -> int:
        """Tokens that a sequence may have."""
        if self.max_length is not None:
            return self.max_length
        positions = getattr(getattr(model, "config", None), "max_position_embeddings", None)
        return min(int(positions or LONGEST), int(tokenizer_at(self.tokenizer).model_max_length), LONGEST)

    def encoded(
        self, texts: Sequence[str], model: nn.Module, *, pad: str = "right", cut: str = "right", reserved: int = 0
    ) -> Any:
        """The texts as one batch, padded on the side `pad`, cut on the side `cut`; `reserved` tokens are left free."""
        tokenizer = tokenizer_at(self.tokenizer)
        tokenizer.padding_side, tokenizer.truncation_side = pad, cut
        length = self.limit(model) - reserved
        batch = tokenizer(list(texts), padding=True, truncation=True, max_length=length, return_tensors="pt")
        batch.pop("token_type_ids", None)
        return batch.to(next(model.parameters()).device)


@dataclass(frozen=True)
class Classification(Asked):
    """`text` and `label` (the index of the class); right when the largest logit is the label's."""

    fields: ClassVar[tuple[str, ...]] = ("text", "label")

    def __call__(self, model: nn.Module, items: Sequence[int]) -> Measures:
        scores: list[float] = []
        for records in self.chosen(items):
            logits = _finite(model(**self.encoded([str(r["text"]) for r in records], model)).logits)
            labels = torch.tensor([int(r["label"]) for r in records], device=logits.device)
            scores += (logits.argmax(-1) == labels).double().tolist()
        return {SCORE: scores}


@dataclass(frozen=True)
class MultipleChoice(Asked):
    """`question`, `options` and `answer` (an index): right when the answer has the highest log-likelihood of all
    options after the prompt, per character of the option with `normalize`."""

    prompt: str = "{context}Question: {question}\nAnswer:"
    normalize: bool = True

    fields: ClassVar[tuple[str, ...]] = ("question", "options", "answer")

    def __call__(self, model: nn.Module, items: Sequence[int]) -> Measures:
        scores: list[float] = []
        for item in items:
            record = self.records[item]
            options = [str(option) for option in record["options"]]
            prompt = _filled(self.prompt, record)
            found: list[float] = []
            for start in range(0, len(options), self.batch):
                found += self._likelihoods(model, item, prompt, options[start : start + self.batch])
            if self.normalize:
                found = [value / max(len(option), 1) for value, option in zip(found, options, strict=True)]
            scores.append(float(max(range(len(found)), key=found.__getitem__) == int(record["answer"])))
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
class Generation(Asked):
    """`question` and `answer`: right when what `pattern` finds last in the reply is what it finds last in the answer.

    Prompt and reply share the `max_length`. Also measures `length`, the reply's tokens, and with `script` (a prefix of
    Unicode names such as "HIRAGANA|CJK") `language`, the share of the reply's letters in it.
    """

    prompt: str = "{context}Question: {question}\nAnswer:"
    pattern: str = r"-?\d[\d,]*(?:\.\d+)?"
    max_new_tokens: int = 128
    script: str | None = None

    fields: ClassVar[tuple[str, ...]] = ("question", "answer")

    @property
    def measures(self) -> tuple[str, ...]:
        return ("length", "language") if self.script else ("length",)

    def __call__(self, model: nn.Module, items: Sequence[int]) -> Measures:
        measures: Measures = {SCORE: [], "length": []}
        if self.script:
            measures["language"] = []
        tokenizer = tokenizer_at(self.tokenizer)
        generate: Callable[..., Tensor] = model.generate  # type: ignore[assignment]
        if (limit := self.limit(model)) <= self.max_new_tokens:
            raise InputError(f"max_new_tokens {self.max_new_tokens} leaves no room for a prompt in {limit} tokens")
        for records in self.chosen(items):
            prompts = [_filled(self.prompt, record) for record in records]
            batch = self.encoded(prompts, model, pad="left", cut="left", reserved=self.max_new_tokens)
            ids = generate(
                **batch, max_new_tokens=self.max_new_tokens, do_sample=False, pad_token_id=tokenizer.pad_token_id
            )
            for record, reply in zip(records, ids[:, batch["input_ids"].shape[1] :], strict=True):
                text = str(tokenizer.decode(reply, skip_special_tokens=True))
                right = extracted(self.pattern, text) == extracted(self.pattern, str(record["answer"]))
                measures[SCORE].append(float(right and extracted(self.pattern, text) is not None))
                measures["length"].append(float((reply != tokenizer.pad_token_id).sum()))
                if self.script:
                    measures["language"].append(share_of_script(text, self.script))
        return measures


@dataclass(frozen=True)
class Perplexity(Asked):
    """`text`: its mean negative log-likelihood per token, to be minimised (its exponential is the perplexity)."""

    def __call__(self, model: nn.Module, items: Sequence[int]) -> Measures:
        scores: list[float] = []
        for records in self.chosen(items):
            batch = self.encoded([str(r["text"]) for r in records], model)
            logs = _token_logs(model(**batch).logits, batch["input_ids"])
            mask = batch["attention_mask"][:, 1:].to(logs.dtype)
            scores += (-(logs * mask).sum(1) / mask.sum(1).clamp_min(1)).tolist()
        return {SCORE: scores}


def extracted(pattern: str, text: str) -> str | None:
    """The last match, its first group if it has one, without thousands separators."""
    found = [match[1] if match.re.groups else match[0] for match in re.finditer(pattern, text)]
    return found[-1].replace(",", "").strip() if found else None


def share_of_script(text: str, script: str) -> float:
    """Share of the letters whose Unicode name starts with one of the `|`-separated prefixes."""
    prefixes = tuple(script.upper().split("|"))
    letters = [unicodedata.name(c, "") for c in text if c.isalpha()]
    return sum(name.startswith(prefixes) for name in letters) / len(letters) if letters else 0.0


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


def _filled(prompt: str, record: Mapping[str, Any]) -> str:
    context = str(record.get("context") or "")
    return prompt.format(**{**record, "context": f"{context}\n" if context else ""})


def _token_logs(logits: Tensor, ids: Tensor) -> Tensor:
    """log p of every token after the first, given those before it."""
    found: Tensor = torch.log_softmax(_finite(logits)[:, :-1].float(), -1).gather(-1, ids[:, 1:, None])[..., 0]
    return found


def _finite(logits: Tensor) -> Tensor:
    """The logits, or an error: comparing NaN would make up answers."""
    if not bool(torch.isfinite(logits).all()):
        raise MerganserError("the merged model's logits are not finite")
    return logits


KINDS: Mapping[str, type[Asked]] = {
    "classification": Classification,
    "multiple-choice": MultipleChoice,
    "generation": Generation,
    "perplexity": Perplexity,
}
