"""The recipe as data, independent of the dialect it was written in."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from merganser.checkpoints.cards import recipe_text
from merganser.checkpoints.dtypes import dtype_name
from merganser.errors import CheckpointError, InputError, RecipeError
from merganser.recipes.quantisation import check_quantisation
from merganser.recipes.settings import Setting
from merganser.units import parse_size

if TYPE_CHECKING:
    import torch

Parameters = Mapping[str, Setting]
#: The text a recipe was read from, or the document that a program gave.
Written = str | Mapping[str, Any]
DEFAULT_SHARD_SIZE = 5_000_000_000
#: Default number of rows that `omp` combines into one.
DEFAULT_TERMS = 8
#: Rules for the rows of tokens that a model does not have.
ABSENT = ("omp", "nearest", "subwords", "weighted_subwords", "mean", "zero")


@dataclass(frozen=True)
class Entry:
    """A model of a merge: a reference to open, or a nested recipe. `layers` [a, b) selects some of its layers.

    `statistics` are the paths of its side checkpoints by kind (`fisher`, `gram`). `map` places it inside the base:
    prefixes of its names -> prefixes in the base.
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
    """Models merged into one run of consecutive layers, or into all layers if its entries have no `layers`."""

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
    """Another method, other parameters or a single `model` for the matching tensors."""

    match: tuple[str, ...]
    where: str
    method: str | None = None
    model: str | None = None
    parameters: Parameters = field(default_factory=dict)


@dataclass(frozen=True)
class TokenRow:
    """The source of the embedding of one token: a model (its own row, or that of another token), or zero.

    `force` uses it for every model, even for those that have the token.
    """

    model: str | None = None
    token: str | int | None = None
    zero: bool = False
    force: bool = False


@dataclass(frozen=True)
class TokenizerOptions:
    """The vocabulary of the output: "base", "union", or a model, which need not be part of the merge.

    `absent` is the rule for tokens that a model has no row for (None: use the rows of the other models); `terms` is the
    number of rows that `omp` combines.
    """

    source: str = "base"
    tokens: Mapping[str, TokenRow] = field(default_factory=dict)
    pad_to_multiple_of: int | None = None
    absent: str | None = None
    terms: int = DEFAULT_TERMS


@dataclass(frozen=True)
class OutputOptions:
    """Options of the output. `dtype` None is the base's, `widest` the widest of the sources; `quantize` may be None."""

    dtype: str | None = None
    widest: bool = False
    shard_size: int = DEFAULT_SHARD_SIZE
    tokenizer: TokenizerOptions | None = None
    chat_template: str | None = None
    exclude: tuple[str, ...] = ()
    quantize: str | None = None


@dataclass(frozen=True)
class Conventions:
    """The meaning of a recipe where dialects differ.

    Attributes:
        base_is_model: A method without a base counts the base as its first model, listed or not.
        depth_after_layers: The depth t of tensors after the layers, such as the head.
        filter_by_source: Patterns in a model's parameters match the tensor's name in that model, not in the output.
        required: Per-model parameters that should be given; the plan notes where the default is used.
    """

    base_is_model: bool = False
    depth_after_layers: float = 1.0
    filter_by_source: bool = False
    required: tuple[str, ...] = ()


class Places(dict[str, str]):
    """Places of a native document -> their names in the document that the user wrote."""

    def rename(self, text: str) -> str:
        """Return a place, or a message that begins with one, with the user's names."""
        found = [
            place for place in self if text.startswith(place) and text[len(place) :][:1] in ("", ":", ".", "[", ",")
        ]
        longest = max(found, key=len, default="")
        return f"{self[longest]}{text[len(longest) :]}" if longest else text


@dataclass(frozen=True)
class Recipe:
    """A merge as the user described it, in either dialect.

    Attributes:
        method: The name of the merging rule.
        parts: The models, by part of the network and slice of layers.
        base: The model that task vectors are relative to.
        parameters: Parameters of the method for all models.
        overrides: Other methods or values for some tensors.
        output: What is written.
        seed: The seed of methods that draw at random.
        match_experts: Put the experts of every mixture in the order of the base's (the first model's) first.
        conventions: What the recipe means where it could mean two things.
        places: The user's names for places of the native document, for messages.
        notes: What the user should know.
        written: The text or document it was read from.
        document: The recipe in native keys, with the recipes written inside it; recipe files stay references.
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
    places: Places = field(default_factory=Places)
    notes: tuple[str, ...] = ()
    written: Written = ""
    document: Mapping[str, Any] = field(default_factory=dict)
    root: Path | None = None

    @property
    def text(self) -> str:
        """Return the recipe as YAML: the text it was read from, or its document."""
        return recipe_text(self.written)

    def with_options(
        self,
        *,
        seed: int | None = None,
        dtype: str | torch.dtype | None = None,
        shard_size: int | str | None = None,
        quantize: str | None = None,
    ) -> Recipe:
        """Return the recipe with another seed, dtype, shard size or quantisation, and with its text updated.

        Raises:
            InputError: If the dtype, size or quantisation is invalid.
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
        """Yield every model that is named: the base first, then in order of appearance, with repetitions."""
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


class Problems:
    """Collects the problems of a recipe or its models, so that all are reported at once."""

    def __init__(self) -> None:
        self._found: dict[str, InputError] = {}

    def __bool__(self) -> bool:
        return bool(self._found)

    def add(self, where: str, message: str) -> None:
        self._keep(RecipeError(f"{where}: {message}" if where else message))

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Turn errors raised inside into problems."""
        try:
            yield
        except (RecipeError, CheckpointError) as error:
            self._keep(error)

    def absorb(self, others: Problems, places: Places) -> None:
        """Add the problems of another collection, with the user's names for places."""
        for error in others._found.values():
            self._keep(type(error)(places.rename(str(error))))

    def finish(self, source: str = "") -> None:
        """Raise all problems: one line per problem; a single error is raised unchanged."""
        prefix = f"{source}: " if source else ""
        errors = list(self._found.values())
        if not errors:
            return
        kind = CheckpointError if all(isinstance(error, CheckpointError) for error in errors) else RecipeError
        if len(errors) == 1:
            raise kind(f"{prefix}{errors[0]}") from errors[0].__cause__
        lines = list(dict.fromkeys(line for error in errors for line in _split_problems(error)))
        raise kind(f"{prefix}{len(lines)} problems\n" + "\n".join(f"  {line}" for line in lines))

    def _keep(self, error: InputError) -> None:
        self._found.setdefault(str(error), error)


def _split_problems(error: InputError) -> list[str]:
    """Return the problems an error lists, each with the error's place, or the error as the only one."""
    heading, *lines = str(error).split("\n")
    place = re.fullmatch(r"(.*: |)\d+ problems", heading)
    if place is None or not lines:
        return [str(error)]
    return [f"{place[1]}{line.strip()}" for line in lines]
