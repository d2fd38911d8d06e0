"""The common part of examiners of `transformers` models: questions, tokenizer, batches, directions of measures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, TypeAlias

from torch import nn

from merganser.errors import InputError, did_you_mean, first_line, require
from merganser.evaluate.model_files import settings_files
from merganser.evaluate.records import Placed, Records, read_records
from merganser.strict_json import parse_json

Measures: TypeAlias = "dict[str, list[float]]"
#: Which values of a measure are better.
Direction: TypeAlias = 'Literal["higher", "lower"]'
#: The name of a task's main measure.
SCORE = "score"
#: Default maximum of tokens, if neither the caller nor the model sets a smaller one.
LONGEST = 2048


class Examiner(Protocol):
    """Asks a model some items of one task. Returns measures by name; `score` is the main one.

    An examiner may have `directions`, from measures to "higher" or "lower"; a measure it leaves out has none.
    """

    def __len__(self) -> int: ...

    def __call__(self, model: nn.Module, items: Sequence[int]) -> Mapping[str, Sequence[float]]: ...


def tokenizer_at(path: str) -> Any:
    """Return the tokenizer of a directory or hub id; without a padding token it pads with the end of text."""
    stats = [(file.name, file.stat()) for file in settings_files(Path(path))]
    return _read_tokenizer(path, tuple((name, s.st_ino, s.st_size, s.st_mtime_ns) for name, s in stats))


@lru_cache(maxsize=8)
def _read_tokenizer(path: str, stamp: object) -> Any:
    loader = require("transformers", "hf").AutoTokenizer
    try:
        tokenizer = loader.from_pretrained(path)
    except Exception as error:  # tokenizers raise many kinds of errors
        reason = f"the questions need its tokenizer, which cannot be loaded: {first_line(error)}"
        raise InputError(f"{path}: {reason}") from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


@dataclass(frozen=True)
class Asked:
    """Questions from a file (or given), a tokenizer, and batches.

    A sequence has at most `max_length` tokens: by default the limit of model and tokenizer, and no more than `LONGEST`.
    Longer texts lose their end; longer prompts lose their beginning, so that the question stays. `fields` gives the
    file's names of fields, as in `{"question": "problem"}`. The questions of another file, `test`, follow.
    """

    source: str | Records
    tokenizer: str
    batch: int = 16
    max_length: int | None = None
    fields: Mapping[str, str] = field(default_factory=dict)
    test: str | None = None

    #: The fields of a record that the examiner needs.
    needed: ClassVar[tuple[str, ...]] = ("text",)

    @property
    def measures(self) -> tuple[str, ...]:
        """The measures besides the score."""
        return ()

    @property
    def directions(self) -> Mapping[str, Direction]:
        """The better direction of each measure; a measure that is missing has none."""
        return {SCORE: "higher"}

    @cached_property
    def records(self) -> Records:
        """The questions, all of them checked."""
        for ours in self.fields:
            if ours not in (known := (*self.needed, "context", "options", "group")):
                raise InputError(f"fields: there is no {ours!r} to rename{did_you_mean(ours, known)}")
        names = [self.fields.get(name, name) for name in self.needed]
        if isinstance(self.source, str):
            placed = read_records(self.source, names)
        else:
            placed = [Placed(f"record {number}", dict(record)) for number, record in enumerate(self.source)]
        if self.test is not None:
            placed = [*placed, *read_records(self.test, names)]
        found = []
        for each in placed:
            for name in names:
                each.field(name)
            renamed = {ours: each.record[theirs] for ours, theirs in self.fields.items() if theirs in each.record}
            found.append(self.validate(Placed(each.place, each.record | renamed)))
        return found

    def validate(self, placed: Placed) -> dict[str, Any]:
        """Return the record of a question as it is asked; an invalid one is an error with its place."""
        return placed.record

    def __len__(self) -> int:
        return len(self.records)

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k != "records"}

    def batches(self, items: Sequence[int]) -> Iterator[Records]:
        for start in range(0, len(items), self.batch):
            yield [self.records[i] for i in items[start : start + self.batch]]

    def limit(self, model: nn.Module) -> int:
        """Return the maximum number of tokens of a sequence."""
        if self.max_length is not None:
            return self.max_length
        positions = getattr(getattr(model, "config", None), "max_position_embeddings", None)
        return min(int(positions or LONGEST), int(tokenizer_at(self.tokenizer).model_max_length), LONGEST)

    def encode(
        self,
        texts: Sequence[str],
        model: nn.Module,
        *,
        pad: str = "right",
        cut: str = "right",
        reserved: int = 0,
        special: bool = True,
    ) -> Any:
        """Return the texts as one batch, padded on the side `pad`, cut on the side `cut`, with `reserved` tokens
        left free.
        """
        tokenizer = tokenizer_at(self.tokenizer)
        tokenizer.padding_side, tokenizer.truncation_side = pad, cut
        length = self.limit(model) - reserved
        options = {"padding": True, "truncation": True, "max_length": length, "add_special_tokens": special}
        batch = tokenizer(list(texts), **options, return_tensors="pt")
        batch.pop("token_type_ids", None)
        return batch.to(next(model.parameters()).device)


def read_index(placed: Placed, name: str, count: int | None = None) -> int:
    """Return a field that is a whole number from 0 (to below `count`), also if it is written as text."""
    value = placed.field(name)
    whole = int(value) if isinstance(value, str) and value.strip().isdecimal() else value
    if isinstance(whole, bool) or not isinstance(whole, int) or whole < 0 or (count is not None and whole >= count):
        bound = "" if count is None else f" below {count}"
        raise InputError(f"{placed.place}: {name!r} must be a whole number from 0{bound}, not {value!r}")
    return whole


def read_options(placed: Placed) -> list[str]:
    """Return the options of a record, two or more; in a table they are a JSON list."""
    value = placed.field("options")
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = parse_json(value)
        except ValueError:
            raise InputError(f"{placed.place}: 'options' is not a JSON list: {value[:40]!r}") from None
    if not isinstance(value, list) or len(value) < 2 or any(isinstance(option, (dict, list)) for option in value):
        raise InputError(f"{placed.place}: 'options' must be a list of two texts or more, not {str(value)[:40]!r}")
    return [str(option) for option in value]
