"""Examiners that fill a prompt with a question, with few-shot examples and chat templates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import nn

from merganser.errors import InputError, did_you_mean
from merganser.evaluate.questions import Asked, tokenizer_at
from merganser.evaluate.records import Placed, Records
from merganser.evaluate.sampling import order_items


@dataclass(frozen=True)
class Prompted(Asked):
    """Questions that are asked by a `prompt` with fields of the record in braces.

    With `shots`, as many solved questions of `examples` (a file like `source`, or records) precede each question, the
    same for all. With `chat`, the prompt is a user's turn in the tokenizer's chat template, and the examples are
    earlier turns.
    """

    prompt: str = "{context}Question: {question}\nAnswer:"
    shots: int = 0
    examples: str | Records | None = None
    chat: bool = False

    def target(self, record: Mapping[str, Any]) -> str:
        """Return the right reply to a record."""
        return str(record["answer"])

    @cached_property
    def solved(self) -> Sequence[tuple[str, str]]:
        """Return the examples: prompts and right replies."""
        if not self.shots:
            return ()
        if self.examples is None:
            raise InputError(f"shots: {self.shots} examples are needed; give their file (examples)")
        others = replace(self, source=self.examples, test=None, shots=0, examples=None)
        if len(others) < self.shots:
            raise InputError(f"shots: {self.shots} examples are needed, but {self.examples} has only {len(others)}")
        chosen = [others.records[item] for item in order_items(others)[: self.shots]]
        return [(fill(self.prompt, record), self.target(record)) for record in chosen]

    @cached_property
    def records(self) -> Records:
        found = super().records
        shown = {prompt for prompt, _ in self.solved}
        for number, record in enumerate(found):
            if shown and fill(self.prompt, record) in shown:
                raise InputError(f"examples: one of them is record {number} of the questions; use another file")
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in super().__getstate__().items() if k != "solved"}

    def turns(self, record: Mapping[str, Any]) -> list[dict[str, str]]:
        """Return the conversation before a reply: the examples, and the question."""
        before = [turn for prompt, reply in self.solved for turn in _build_turns(prompt, reply)]
        return [*before, {"role": "user", "content": fill(self.prompt, record)}]

    def ask(self, record: Mapping[str, Any]) -> str:
        """Return the whole text before a reply: examples, prompt, and turn markers."""
        if not self.chat:
            return "".join(f"{prompt} {reply}\n\n" for prompt, reply in self.solved) + fill(self.prompt, record)
        tokenizer = tokenizer_at(self.tokenizer)
        if not tokenizer.chat_template:
            raise InputError(f"chat: the tokenizer of {self.tokenizer} has no chat template; leave it out")
        text: str = tokenizer.apply_chat_template(self.turns(record), tokenize=False, add_generation_prompt=True)
        return text

    def tokens(self, texts: Sequence[str], model: nn.Module) -> list[list[int]]:
        """Return the tokens of whole texts; texts that are too long lose their beginning."""
        tokenizer, limit = tokenizer_at(self.tokenizer), self.limit(model)
        special = not self.chat  # a template adds its own
        found = tokenizer(list(texts), add_special_tokens=special, verbose=False)["input_ids"]
        long = [place for place, ids in enumerate(found) if len(ids) > limit]
        if long:
            tokenizer.truncation_side = "left"
            short = tokenizer(
                [texts[place] for place in long], truncation=True, max_length=limit, add_special_tokens=special
            )["input_ids"]
            for place, ids in zip(long, short, strict=True):
                found[place] = ids
        return [list(ids) for ids in found]


def _build_turns(prompt: str, reply: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": reply}]


def fill(prompt: str, record: Mapping[str, Any]) -> str:
    """Return the prompt with the fields of a record; a context is on its own lines."""
    context = str(record.get("context") or "")
    return prompt.format(**{**record, "context": f"{context}\n" if context else ""})


def check_prompt(prompt: str, placed: Placed) -> None:
    """Refuse a prompt that is not a template, or that names a field which the record lacks."""
    try:
        fill(prompt, placed.record)
    except (KeyError, IndexError) as error:
        name = str(error.args[0]) if error.args else ""
        raise InputError(
            f"{placed.place}: the prompt asks for the field {name!r}, which the record does not have"
            f"{did_you_mean(name, map(str, placed.record))}"
        ) from None
    except (ValueError, AttributeError, TypeError) as error:
        raise InputError(f"prompt {prompt!r}: cannot be filled in: {error}; write a brace as {{{{") from None
