"""Examiners that read what a model writes: a value, a letter, a line."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from merganser.errors import InputError, MerganserError, require
from merganser.evaluate.answers.choices import LETTERS, find_choice, read_choice
from merganser.evaluate.answers.formulas import is_formula
from merganser.evaluate.answers.judging import holds_number, is_right, load_verifier
from merganser.evaluate.answers.languages import check_language, is_in_language
from merganser.evaluate.answers.marks import cut
from merganser.evaluate.endpoints import Server
from merganser.evaluate.prompts import Prompted, check_prompt
from merganser.evaluate.questions import SCORE, Direction, Measures, read_options, tokenizer_at
from merganser.evaluate.records import Placed, Records
from merganser.evaluate.sampling import batches_by_length

#: What a model writes when it continues with a question of its own.
STOPS = ("\nQuestion:", "\n\nQuestion", "\nQ:", "\nProblem:", "\nUser:", "\nHuman:", "<|im_start|>", "<|user|>")
#: Number of tokens at the end of a reply that are searched for a stop string.
TAIL = 16


@dataclass(frozen=True)
class Generation(Prompted):
    """`question` and `answer`: right if the reply's answer has the value of the reference.

    With `pattern`, right if its last match in the reply equals its last match in the answer, letter by letter. A reply
    ends where one of the `stop` strings begins. Prompt and reply share the `max_length`. Also measures `length`, the
    reply's tokens. With `language` (a code such as "ja") a reply must be right and in that language; then `correct` and
    `language` are measured separately. With `script` (a prefix of Unicode names such as "HIRAGANA|CJK") `language` is
    the share of the reply's letters in it, and the score does not depend on it.
    """

    pattern: str | None = None
    max_new_tokens: int = 128
    script: str | None = None
    language: str | None = None
    stop: Sequence[str] = STOPS

    needed: ClassVar[tuple[str, ...]] = ("question", "answer")

    @property
    def measures(self) -> tuple[str, ...]:
        if self.language is not None:
            return ("length", "correct", "language")
        return ("length", "language") if self.script else ("length",)

    @property
    def directions(self) -> Mapping[str, Direction]:
        return {SCORE: "higher", **{name: "higher" for name in self.measures if name != "length"}}

    @cached_property
    def records(self) -> Records:
        if self.language is not None:
            if self.script is not None:
                raise InputError("script and language both define how language is measured; give one of them")
            check_language(self.language)
        return super().records

    def validate(self, placed: Placed) -> dict[str, Any]:
        check_prompt(self.prompt, placed)
        answer = str(placed.record["answer"])
        if self.pattern is not None:
            if find_last_match(self.pattern, answer) is None:
                raise InputError(f"{placed.place}: the pattern {self.pattern!r} finds nothing in the answer {answer!r}")
        elif not holds_number(answer):
            if not is_formula(answer) and not re.search(r"[\\^_]", answer):
                raise InputError(
                    f"{placed.place}: the answer {answer[:40]!r} contains no number; use kind exact-match or choice, "
                    "or a pattern"
                )
            load_verifier(answer)
        return placed.record

    def is_right(self, reply: str, record: Mapping[str, Any]) -> bool:
        """Return whether a reply, cut at its stop string, gives the answer of a record."""
        if self.pattern is None:
            return is_right(reply, str(record["answer"]))
        found = find_last_match(self.pattern, reply)
        return found is not None and found == find_last_match(self.pattern, str(record["answer"]))

    def __call__(self, model: nn.Module | Server, items: Sequence[int]) -> Measures:
        if isinstance(model, Server):
            found = self._ask_server(model, [self.records[item] for item in items])
        else:
            found = self._ask_model(model, items)
        return {name: [each[name] for each in found] for name in (SCORE, *self.measures)}

    def _ask_server(self, server: Server, records: Sequence[Mapping[str, Any]]) -> list[dict[str, float]]:
        """Return replies of a server; their length is in words, since its tokens are unknown."""
        if self.chat:
            replies = server.chat([self.turns(record) for record in records], self.max_new_tokens)
        else:
            replies = server.complete([self.ask(record) for record in records], self.max_new_tokens, self.stop)
        texts = [cut(reply, self.stop) for reply in replies]
        return [
            self._judge(text, record) | {"length": float(len(text.split()))}
            for text, record in zip(texts, records, strict=True)
        ]

    def _ask_model(self, model: nn.Module, items: Sequence[int]) -> list[dict[str, float]]:
        tokenizer = tokenizer_at(self.tokenizer)
        generate: Callable[..., Tensor] = model.generate  # type: ignore[assignment]
        if (limit := self.limit(model)) <= self.max_new_tokens:
            raise InputError(f"max_new_tokens {self.max_new_tokens} leaves no room for a prompt in {limit} tokens")
        prompts = [self.ask(self.records[item]) for item in items]
        replies: dict[int, dict[str, float]] = {}
        seq2seq = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
        for chosen in batches_by_length([len(prompt) for prompt in prompts], self.batch):
            batch = self.encode(
                [prompts[n] for n in chosen],
                model,
                pad="left",
                cut="left",
                reserved=0 if seq2seq else self.max_new_tokens,
                special=not self.chat,
            )
            start = 1 if seq2seq else batch["input_ids"].shape[1]
            ids = generate(
                **batch,
                max_new_tokens=self.max_new_tokens,
                do_sample=False,
                pad_token_id=tokenizer.pad_token_id,
                stopping_criteria=_stop_at(tokenizer, tuple(self.stop), start),
                logits_processor=[_require_numbers],
            )
            for number, reply in zip(chosen, ids[:, start:], strict=True):
                text = cut(str(tokenizer.decode(reply, skip_special_tokens=True)), self.stop)
                length = float((reply != tokenizer.pad_token_id).sum())
                replies[number] = self._judge(text, self.records[items[number]]) | {"length": length}
        return [replies[number] for number in range(len(prompts))]

    def _judge(self, reply: str, record: Mapping[str, Any]) -> dict[str, float]:
        right = float(self.is_right(reply, record))
        if self.language is not None:
            spoken = float(is_in_language(reply, self.language))
            return {SCORE: right * spoken, "correct": right, "language": spoken}
        return {SCORE: right, **({"language": share_of_script(reply, self.script)} if self.script else {})}


@dataclass(frozen=True)
class ExactMatch(Generation):
    """`question` and `answer`: right if the first line of the reply equals the answer's, letter by letter."""

    def validate(self, placed: Placed) -> dict[str, Any]:
        check_prompt(self.prompt, placed)
        if not str(placed.record["answer"]).strip():
            raise InputError(f"{placed.place}: the answer is empty")
        return placed.record

    def is_right(self, reply: str, record: Mapping[str, Any]) -> bool:
        return first_line(reply) == first_line(str(record["answer"]))


@dataclass(frozen=True)
class LetterChoice(Generation):
    """`question`, `answer` and `options`: right if the reply chooses the answer's letter.

    `answer` is a letter, the index of an option or its text. `options` may be left out if the question lists them;
    otherwise the prompt shows them as `A. …` (`{choices}`).
    """

    prompt: str = "{context}Question: {question}\n{choices}Answer:"
    max_new_tokens: int = 32

    def validate(self, placed: Placed) -> dict[str, Any]:
        options = read_options(placed) if placed.record.get("options") is not None else []
        letter = read_choice(placed.record["answer"], options)
        if letter is None:
            known = f"a letter up to {LETTERS[len(options) - 1]}, an index or an option" if options else "a letter"
            raise InputError(f"{placed.place}: 'answer' must be {known}, not {placed.record['answer']!r}")
        lines = [f"{name}. {option}\n" for name, option in zip(LETTERS, options, strict=False)]
        asked = placed.record | {"options": options, "letter": letter, "choices": "".join(lines)}
        check_prompt(self.prompt, Placed(placed.place, asked))
        return asked

    def target(self, record: Mapping[str, Any]) -> str:
        return str(record["letter"])

    def is_right(self, reply: str, record: Mapping[str, Any]) -> bool:
        return bool(find_choice(reply, record["options"]) == record["letter"])


def _require_numbers(_: Tensor, scores: Tensor) -> Tensor:
    """Return the logits of the next token, or raise an error: the largest of NaNs would be some token."""
    if bool(scores.isnan().any()):
        raise MerganserError("the merged model's logits are not finite")
    return scores


def find_last_match(pattern: str, text: str) -> str | None:
    """Return the last match of a pattern, its first group if it has one, without thousands separators."""
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise InputError(f"pattern {pattern!r}: not a regular expression: {error}") from None
    found = [(match[1] or "") if compiled.groups else match[0] for match in compiled.finditer(text)]
    return found[-1].replace(",", "").strip() if found else None


def first_line(text: str) -> str:
    """Return the first non-empty line, without surrounding space."""
    return next((line.strip() for line in text.split("\n") if line.strip()), "")


def share_of_script(text: str, script: str) -> float:
    """Return the share of letters whose Unicode name starts with one of the `|`-separated prefixes."""
    prefixes = tuple(script.upper().split("|"))
    letters = [unicodedata.name(c, "") for c in text if c.isalpha()]
    return sum(name.startswith(prefixes) for name in letters) / len(letters) if letters else 0.0


@lru_cache(maxsize=1)
def _define_stopper() -> type:
    """Return the class of the stopping criterion, defined once `transformers` is imported."""
    base: Any = require("transformers", "hf").StoppingCriteria

    class StopStrings(base):  # type: ignore[misc]
        """Ends each reply of a batch at a stop string."""

        def __init__(self, tokenizer: Any, stops: Sequence[str], start: int) -> None:
            self.tokenizer, self.stops, self.start = tokenizer, stops, start

        def __call__(self, input_ids: Tensor, scores: Tensor, **options: Any) -> Tensor:
            tails = input_ids[:, self.start :][:, -TAIL:]
            texts = self.tokenizer.batch_decode(tails, skip_special_tokens=True)
            ended = [bool(text.strip()) and any(stop in text for stop in self.stops) for text in texts]
            return torch.tensor(ended, device=input_ids.device)

    return StopStrings


def _stop_at(tokenizer: Any, stops: Sequence[str], start: int) -> list[Any] | None:
    return [_define_stopper()(tokenizer, stops, start)] if stops else None
