"""What a merging rule is: a frozen record of its hyper-parameters and one function to a tensor."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from merganser.checkpoints.base import TensorSpec
from merganser.errors import RecipeError, did_you_mean

Reach = Literal["elementwise", "reduce_map", "whole"]
State = Any
T = TypeVar("T")


@dataclass(frozen=True)
class Group:
    """One output tensor, or a block of its rows, with everything a rule may look at.

    Tensors are float32 (float64 if a source is) and must not be written into. `offset` is the flat index of
    the block's first element in the whole tensor and `shape` the whole tensor's shape.
    """

    name: str
    models: tuple[Tensor, ...]
    base: Tensor | None = None
    labels: tuple[str, ...] = ()
    shape: tuple[int, ...] = ()
    offset: int = 0
    seed: int = 0
    statistics: Mapping[str, tuple[Tensor, ...]] = field(default_factory=dict)
    prepared: State = None
    #: Whether infinite entries and NaN have been ruled out.
    finite: bool = True

    @property
    def anchor(self) -> Tensor:
        """The base's tensor, for rules that cannot do without."""
        assert self.base is not None, "the plan guarantees a base to rules that need one"
        return self.base

    def deltas(self) -> list[Tensor]:
        """Task vectors Δ_t = θ_t − θ_0, fresh contiguous tensors that may be written into."""
        return [(model - self.anchor).contiguous() for model in self.models]

    def random_bits(self, model: int) -> Tensor:
        """Uniform signed 16-bit integers, one per element of this block; `bits < threshold(p)` has probability p.

        The stream is keyed by (seed, tensor name, model label) and addressed by element: it depends neither
        on blocks and threads nor on the order of the models.
        """
        key = f"{self.seed}\0{self.name}\0{self.labels[model]}".encode()
        stream = np.random.PCG64DXSM(int.from_bytes(hashlib.blake2b(key, digest_size=16).digest(), "little"))
        stream.advance(self.offset // 4)
        skip, count = self.offset % 4, self.models[model].numel()
        words = stream.random_raw((skip + count + 3) // 4)
        bits = torch.from_numpy(words.view(np.int16)[skip : skip + count]).view(self.models[model].shape)
        return bits.to(self.models[model].device)


def threshold(probability: float) -> int:
    """The integer that uniform signed 16-bit integers stay below with this probability, rounded to 2⁻¹⁶."""
    return round(probability * 2**16) - 2**15


class Blocks(Protocol):
    """The blocks of one output tensor, readable any number of times, in the order of their elements.

    How a tensor is cut is a function of its shape alone. Matrices are cut between rows, larger tensors between
    rows of the first axis too, unless such a row has more than 2¹⁶ elements; vectors anywhere.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Group:
        """One block alone: a sample, or a second look, without a pass over the others."""
        ...

    def __iter__(self) -> Iterator[Group]: ...

    def map(self, function: Callable[[Group], T]) -> list[T]:
        """`function` of every block, in block order, possibly computed in parallel."""
        ...


@dataclass(frozen=True)
class Method(ABC):
    """A merging rule; fields are its hyper-parameters, resolved for one tensor.

    Declares its `reach`:

    - `elementwise`: `merge` sees any block of rows and needs nothing else;
    - `reduce_map`: `reduce` streams over the blocks as often as it likes and returns a state for `merge`;
    - `whole`: `merge` sees the whole tensor.

    A field made with `per_model(...)` holds a tuple with one value per model.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    reach: ClassVar[Reach] = "elementwise"
    #: "required": works on deltas; "optional"; "none": a base named in the recipe is only the template.
    base: ClassVar[Literal["required", "optional", "none"]] = "none"
    models: ClassVar[tuple[int, float]] = (1, math.inf)
    #: Side checkpoints a rule wants per model, e.g. ("fisher",).
    statistics: ClassVar[tuple[str, ...]] = ()
    #: Other names under which recipes may ask for this rule.
    also: ClassVar[tuple[str, ...]] = ()
    #: Other tools' parameters that have nothing to act on here: accepted in their recipes, without effect.
    ignored: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def check_inputs(cls, models: int, base: bool, where: str = "") -> None:
        """An error if this rule cannot merge so many models, with or without a base; for the planner."""
        where = where or f"method {cls.name!r}"
        low, high = cls.models
        if cls.base == "required" and not base:
            raise RecipeError(f"{where}: a base model is needed (the task vectors are differences from it)")
        if not low <= models <= high:
            wanted = f"{low}" if low == high else f"at least {low}" if high == math.inf else f"{low} to {high:g}"
            besides = " besides the base" if base and cls.base != "none" else ""
            raise RecipeError(f"{where}: expected {wanted} model(s){besides}, got {models}")

    @classmethod
    def statistic_shape(cls, kind: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a statistic of that kind for a tensor of this shape."""
        return shape

    def reduce(self, blocks: Blocks) -> State:
        """What `merge` must know of the whole tensor (reduce_map only)."""
        return None

    @abstractmethod
    def merge(self, group: Group, state: State = None) -> Tensor:
        """The output for this block (or whole tensor), in the dtype of the inputs; may be an input itself."""

    def prepare(self, tensors: Iterable[tuple[Mapping[str, Any], Blocks]]) -> State:
        """A look at every tensor first, for global quantities; a JSON value kept with the plan."""
        return None

    def needs_preparation(self) -> bool:
        return False

    def scratch(self, spec: TensorSpec, models: int) -> int:
        """Bytes a `whole` rule holds beyond its inputs, for the memory bound; `spec` is of the arithmetic's dtype."""
        return spec.nbytes * (models + 2)


@dataclass(frozen=True)
class Parameter:
    """A hyper-parameter as recipes, the command line and the documentation see it."""

    name: str
    kind: type
    default: Any
    help: str
    per_model: bool
    low: float | None
    high: float | None
    choices: tuple[str, ...] | None
    required: bool
    #: What a mergekit recipe means that leaves the parameter out.
    mergekit: Any = None

    def check(self, value: Any, where: str) -> Any:
        """The value in its own type, or an error that names the place."""
        if self.choices is not None:
            if value not in self.choices:
                raise RecipeError(f"{where}: {value!r} is not one of {', '.join(map(repr, self.choices))}")
            return value
        if self.kind is bool:
            if not isinstance(value, bool) and value not in (0, 1):
                raise RecipeError(f"{where}: expected true or false, got {value!r}")
            return bool(value)
        if self.kind is tuple:
            if not isinstance(value, (list, tuple)) or not all(isinstance(v, str) for v in value):
                raise RecipeError(f"{where}: expected a list of strings, got {value!r}")
            return tuple(value)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise RecipeError(f"{where}: expected a number, got {value!r}")
        if self.kind is int and value != int(value):
            raise RecipeError(f"{where}: expected a whole number, got {value!r}")
        if not math.isfinite(value):
            raise RecipeError(f"{where}: expected a finite number, got {value!r}")
        low, high = self.low, self.high
        if (low is not None and value < low) or (high is not None and value > high):
            bounds = f"at least {low}" if high is None else f"at most {high}" if low is None else f"in [{low}, {high}]"
            raise RecipeError(f"{where}: {value!r} is out of bounds, must be {bounds}")
        return self.kind(value)


def param(
    default: Any = dataclasses.MISSING,
    help: str = "",
    *,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] | None = None,
    aliases: tuple[str, ...] = (),
    mergekit: Any = None,
) -> Any:
    """A hyper-parameter; without a default it is required.

    `aliases` are other tools' names for it, `mergekit` its default there if it is another one.
    """
    return field(default=default, metadata=_metadata(default, help, low, high, choices, aliases, mergekit, False))


def per_model(
    default: Any = dataclasses.MISSING,
    help: str = "",
    *,
    low: float | None = None,
    high: float | None = None,
    aliases: tuple[str, ...] = (),
    mergekit: Any = None,
) -> Any:
    """A hyper-parameter with one value for each model; the field holds a tuple."""
    return field(default=(), metadata=_metadata(default, help, low, high, None, aliases, mergekit, True))


def _metadata(
    default: Any,
    help: str,
    low: float | None,
    high: float | None,
    choices: tuple[str, ...] | None,
    aliases: tuple[str, ...],
    mergekit: Any,
    per_model: bool,
) -> dict[str, Any]:
    return {
        "default": default,
        "help": help,
        "low": low,
        "high": high,
        "choices": choices,
        "aliases": aliases,
        "mergekit": mergekit,
        "per_model": per_model,
    }


_REGISTRY: dict[str, type[Method]] = {}
M = TypeVar("M", bound=type[Method])


def register(cls: M) -> M:
    """Class decorator: makes the rule known by its `name` and what it is `also` called."""
    for name in (cls.name, *cls.also):
        if name in _REGISTRY:
            raise ValueError(f"two methods are called {name!r}")
        _REGISTRY[name] = cls
    return cls


def registry() -> Mapping[str, type[Method]]:
    """Every method by its own name, sorted."""
    import merganser.methods  # noqa: F401  (registers the families)

    return {name: method for name, method in sorted(_REGISTRY.items()) if name == method.name}


def lookup(name: str, where: str = "method", others: Iterable[str] = ()) -> type[Method]:
    """The method of that name, its own or another tool's; an error may suggest `others`, which are no rules."""
    methods = registry()
    if name not in _REGISTRY:
        raise RecipeError(f"{where}: unknown method {name!r}{did_you_mean(name, (*methods, *others))}")
    return _REGISTRY[name]


@functools.cache
def parameters(method: type[Method]) -> Mapping[str, Parameter]:
    """The hyper-parameters of a rule, in order of declaration."""
    hints = typing.get_type_hints(method)
    found = {}
    for entry in dataclasses.fields(method):
        meta = entry.metadata
        default = meta["default"]
        kind = typing.get_args(hints[entry.name])[0] if meta["per_model"] else hints[entry.name]
        if type(None) in typing.get_args(kind):
            kind = next(k for k in typing.get_args(kind) if k is not type(None))
        found[entry.name] = Parameter(
            name=entry.name,
            kind=typing.get_origin(kind) or kind,
            default=None if default is dataclasses.MISSING else default,
            help=meta["help"],
            per_model=meta["per_model"],
            low=meta["low"],
            high=meta["high"],
            choices=meta["choices"],
            required=default is dataclasses.MISSING,
            mergekit=meta["mergekit"],
        )
    return found


def aliases(method: type[Method]) -> dict[str, str]:
    """Other tools' names for this rule's parameters: alias -> own name."""
    return {alias: f.name for f in dataclasses.fields(method) for alias in f.metadata["aliases"]}


def mergekit_defaults(method: type[Method]) -> dict[str, Any]:
    """Parameters a mergekit recipe may leave out and then means otherwise than our default."""
    return {p.name: p.mergekit for p in parameters(method).values() if p.mergekit is not None}


def build(method: type[Method], values: Mapping[str, Any], models: Sequence[str]) -> Method:
    """The rule for one tensor from resolved values (per-model ones as sequences), checked, defaults filled in."""
    known = parameters(method)
    for name in values:
        if name not in known:
            raise RecipeError(f"unknown parameter {name!r} of method {method.name!r}{did_you_mean(name, known)}")
    settings: dict[str, Any] = {}
    for name, parameter in known.items():
        value = values.get(name, parameter.default)
        if name not in values and parameter.required:
            raise RecipeError(f"method {method.name!r} needs the parameter {name!r} ({parameter.help})")
        if not parameter.per_model:
            settings[name] = value if name not in values else parameter.check(value, f"{method.name}.{name}")
            continue
        each = value if isinstance(value, (list, tuple)) else [value] * len(models)
        if len(each) != len(models):
            raise RecipeError(f"{method.name}.{name}: {len(each)} values for {len(models)} models")
        settings[name] = tuple(
            parameter.check(v, f"{method.name}.{name} of {model}") if v is not None else None
            for v, model in zip(each, models, strict=True)
        )
    return method(**settings)
