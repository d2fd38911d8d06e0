"""What the user asked for, whichever dialect it was written in."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from merganser.checkpoints.dtypes import dtype_name
from merganser.errors import CheckpointError, InputError, RecipeError
from merganser.plain import to_yaml
from merganser.recipes.quantisation import check_quantisation
from merganser.recipes.settings import Setting
from merganser.units import parse_size

if TYPE_CHECKING:
    import torch

Parameters = Mapping[str, Setting]
#: What a recipe was read from: a text, or the document that a program gave.
Written = str | Mapping[str, Any]
DEFAULT_SHARD_SIZE = 5_000_000_000
#: How many rows `omp` combines into one.
DEFAULT_TERMS = 8
#: The rules for the rows of tokens that a model does not have.
ABSENT = ("omp", "nearest", "subwords", "weighted_subwords", "mean", "zero")


@dataclass(frozen=True)
class Entry:
    """A model of a merge: a reference to open, or a recipe of its own. `layers` [a, b) takes part of its depth.

    `statistics` are the paths of its side checkpoints by kind (`fisher`, `gram`). `map` says which part of the base it
    is: beginnings of its names -> what they are in the base.
    """

    label: str
    where: str
    recipe: Recipe | None = None
    layers: tuple[int, int] | None = None
    parameters: Parameters = field(default_factory=dict)
    statistics: Mapping[str, str] = field(default_factory=dict)
    map: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Slice:
    """Models merged into one run of consecutive layers; without `layers` in its entries, into all of them."""

    models: tuple[Entry, ...]
    where: str
    base: Entry | None = None
    parameters: Parameters = field(default_factory=dict)


@dataclass(frozen=True)
class Part:
    """A part of the network with its own slices: all of it, or one module (`vision_tower`)."""

    slices: tuple[Slice, ...]
    module: str | None = None
    parameters: Parameters = field(default_factory=dict)

    @property
    def sliced(self) -> bool:
        return any(entry.layers for s in self.slices for entry in s.models)


@dataclass(frozen=True)
class Override:
    """Another method, other parameters or a single `model` for the tensors that match."""

    match: tuple[str, ...]
    where: str
    method: str | None = None
    model: str | None = None
    parameters: Parameters = field(default_factory=dict)


@dataclass(frozen=True)
class TokenRow:
    """Where the embedding of one token comes from: a model (its own row, or that of another token), or zero.

    `force` takes it for every model, also for those that have the token.
    """

    model: str | None = None
    token: str | int | None = None
    zero: bool = False
    force: bool = False


@dataclass(frozen=True)
class TokenizerOptions:
    """The vocabulary of the output: "base", "union", or that of a model, which need not be one of the merge.

    `absent` is the rule for tokens that a model has no row for, None for the rows of the other models; `terms` is how
    many rows `omp` combines.
    """

    source: str = "base"
    tokens: Mapping[str, TokenRow] = field(default_factory=dict)
    pad_to_multiple_of: int | None = None
    absent: str | None = None
    terms: int = DEFAULT_TERMS


@dataclass(frozen=True)
class OutputOptions:
    """What is written: `dtype` None is that of the base, or `widest` of the sources; `quantize` None is as it is."""

    dtype: str | None = None
    widest: bool = False
    shard_size: int = DEFAULT_SHARD_SIZE
    tokenizer: TokenizerOptions | None = None
    chat_template: str | None = None
    exclude: tuple[str, ...] = ()
    quantize: str | None = None


@dataclass(frozen=True)
class Conventions:
    """Where a recipe may mean two things, what it means.

    Attributes:
        base_is_model: The base is one of the models: the first, listed or not, of a method that knows no base.
        depth_after_layers: The depth t of tensors that come after the layers, such as the head.
        filter_by_source: Patterns of a model's parameters look at the tensor's name in that model, not in the output.
        required: Parameters of each model that should be given: the method's default is noted where it is taken.
    """

    base_is_model: bool = False
    depth_after_layers: float = 1.0
    filter_by_source: bool = False
    required: tuple[str, ...] = ()


@dataclass(frozen=True)
class OutputKeys:
    """What the options of the output are called where the recipe was written, for messages."""

    dtype: str = "output.dtype"
    tokenizer: str = "output.tokenizer"
    chat_template: str = "output.chat_template"
    exclude: str = "output.exclude"


@dataclass(frozen=True)
class Recipe:
    """A merge as the user asked for it, whatever it was written in.

    Attributes:
        method: The name of the merging rule.
        parts: The models, by part of the network and slice of layers.
        base: The model that task vectors are differences from.
        parameters: Parameters of the method for all models.
        overrides: Other methods or values for some tensors.
        output: What is written.
        seed: The seed of methods that draw at random.
        match_experts: Put the experts of every mixture in the order of the base's (the first model's) first.
        conventions: What the recipe means where it could mean two things.
        keys: What the options are called where the recipe was written, for messages.
        notes: What the user should know.
        written: The text or document it was read from.
        root: The directory of its file.

    Example:
        >>> recipe = mg.recipes.load({"method": "linear", "models": ["./math", "./code"]})
        >>> recipe.method
        'linear'
    """

    method: str
    parts: tuple[Part, ...]
    base: Entry | None = None
    parameters: Parameters = field(default_factory=dict)
    overrides: tuple[Override, ...] = ()
    output: OutputOptions = OutputOptions()
    seed: int = 0
    match_experts: bool = False
    conventions: Conventions = Conventions()
    keys: OutputKeys = OutputKeys()
    notes: tuple[str, ...] = ()
    written: Written = ""
    root: Path | None = None

    @property
    def text(self) -> str:
        """The recipe as YAML: the text it was read from, or what its document says."""
        return self.written if isinstance(self.written, str) else to_yaml(self.written)

    def with_options(
        self,
        *,
        seed: int | None = None,
        dtype: str | torch.dtype | None = None,
        shard_size: int | str | None = None,
        quantize: str | None = None,
    ) -> Recipe:
        """Return the recipe with another seed, dtype, shard size or quantisation, which its text then says.

        Raises:
            InputError: If there is no such dtype, size or quantisation.
        """
        given = {"seed": seed, "output.dtype": dtype, "output.shard_size": shard_size, "output.quantize": quantize}
        said = [f"{key}: {value}" for key, value in given.items() if value is not None]
        if not said:
            return self
        output = replace(
            self.output,
            dtype=self.output.dtype if dtype is None else dtype_name(dtype),
            shard_size=self.output.shard_size if shard_size is None else _size(shard_size),
            quantize=self.output.quantize if quantize is None else check_quantisation(quantize),
        )
        text = f"{self.text.rstrip()}\n# changed when it was run to {', '.join(said)}\n"
        return replace(self, seed=self.seed if seed is None else seed, output=output, written=text)

    def entries(self) -> Iterator[Entry]:
        """Every model named: the base first, then in order of appearance, with repetitions."""
        if self.base:
            yield self.base
        for part in self.parts:
            for each in part.slices:
                if each.base:
                    yield each.base
                yield from each.models


def _size(given: int | str) -> int:
    found = parse_size(str(given))
    if found < 1:
        raise InputError(f"shard size: expected at least a byte, got {given!r}")
    return found


class Places(dict[str, str]):
    """Places of a native document -> what they are called in the document that the user wrote."""

    def rename(self, text: str) -> str:
        """Return a place, or a message that begins with one, in the user's words."""
        found = [
            place for place in self if text.startswith(place) and text[len(place) :][:1] in ("", ":", ".", "[", ",")
        ]
        longest = max(found, key=len, default="")
        return f"{self[longest]}{text[len(longest) :]}" if longest else text


class Problems:
    """Collects what is wrong with a recipe or its models, so that all of it is said at once."""

    def __init__(self) -> None:
        self._found: dict[str, InputError] = {}

    def __bool__(self) -> bool:
        return bool(self._found)

    def add(self, where: str, message: str) -> None:
        self._keep(RecipeError(f"{where}: {message}" if where else message))

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Errors raised inside become problems."""
        try:
            yield
        except (RecipeError, CheckpointError) as error:
            self._keep(error)

    def absorb(self, others: Problems, places: Places) -> None:
        """Take over what others have collected, in the user's words."""
        for error in others._found.values():
            self._keep(type(error)(places.rename(str(error))))

    def finish(self, source: str = "") -> None:
        """Raise everything found: one line a problem, a lone error as it is."""
        prefix = f"{source}: " if source else ""
        errors = list(self._found.values())
        if not errors:
            return
        kind = CheckpointError if all(isinstance(error, CheckpointError) for error in errors) else RecipeError
        if len(errors) == 1:
            raise kind(f"{prefix}{errors[0]}") from errors[0].__cause__
        lines = list(dict.fromkeys(line for error in errors for line in _lines(error)))
        raise kind(f"{prefix}{len(lines)} problems\n" + "\n".join(f"  {line}" for line in lines))

    def _keep(self, error: InputError) -> None:
        self._found.setdefault(str(error), error)


def _lines(error: InputError) -> list[str]:
    """Return the problems an error lists, each with the place the error names, or the error as the only one."""
    heading, *lines = str(error).split("\n")
    place = re.fullmatch(r"(.*: |)\d+ problems", heading)
    if place is None or not lines:
        return [str(error)]
    return [f"{place[1]}{line.strip()}" for line in lines]
