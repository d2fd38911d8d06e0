"""What a merging rule is: a frozen record of its hyper-parameters and one function to a tensor."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import typing
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

    @property
    def anchor(self) -> Tensor:
        """The base's tensor, for rules that cannot do without."""
        assert self.base is not None, "the plan guarantees a base to rules that need one"
        return self.base

    def deltas(self) -> list[Tensor]:
        """Task vectors Δ_t = θ_t − θ_0, fresh tensors that may be written into."""
        return [model - self.anchor for model in self.models]

    def random_bits(self, model: int) -> Tensor:
        """Uniform 32-bit integers (as int64), one per element of this block.

        The stream is keyed by (seed, tensor name, model label) and addressed by element: it depends neither
        on blocks and threads nor on the order of the models.
        """
        key = f"{self.seed}\0{self.name}\0{self.labels[model]}".encode()
        stream = np.random.PCG64DXSM(int.from_bytes(hashlib.blake2b(key, digest_size=16).digest(), "little"))
        stream.advance(self.offset // 2)
        skip, count = self.offset % 2, self.models[model].numel()
        words = stream.random_raw((skip + count + 1) // 2).view(np.uint32)
        return torch.from_numpy(words[skip : skip + count].astype(np.int64)).view(self.models[model].shape)


class Blocks(Protocol):
    """The blocks of one output tensor, readable any number of times."""

    shape: tuple[int, ...]

    def __iter__(self) -> Iterator[Group]: ...

    def map(self, function: Callable[[Group], T]) -> list[T]:
        """`function` of every block, in block order, possibly computed in parallel."""
        ...


@dataclass(frozen=True)
class Method:
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

    def reduce(self, blocks: Blocks) -> State:
        """What `merge` must know of the whole tensor (reduce_map only)."""
        return None

    def merge(self, group: Group, state: State = None) -> Tensor:
        """The output for this block (or whole tensor), in the dtype of the inputs."""
        raise NotImplementedError

    def prepare(self, tensors: Iterable[tuple[Mapping[str, Any], Blocks]]) -> State:
        """A look at every tensor first, for global quantities; a JSON value kept with the plan."""
        return None

    def needs_preparation(self) -> bool:
        return False

    def scratch(self, spec: TensorSpec, models: int) -> int:
        """Bytes a `whole` rule holds beyond its inputs, for the memory bound of the plan."""
        return 4 * spec.numel * (models + 2)


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
) -> Any:
    """A hyper-parameter; without a default it is required. `aliases` are other tools' names for it."""
    metadata = {
        "help": help,
        "low": low,
        "high": high,
        "choices": choices,
        "aliases": aliases,
        "per_model": False,
    }
    return field(default=default, metadata=metadata)


def per_model(
    default: Any = dataclasses.MISSING, help: str = "", *, low: float | None = None, high: float | None = None
) -> Any:
    """A hyper-parameter with one value for each model; the field holds a tuple."""
    metadata = {"help": help, "low": low, "high": high, "choices": None, "aliases": (), "per_model": True}
    metadata["default"] = default
    return field(default=(), metadata=metadata)


_REGISTRY: dict[str, type[Method]] = {}
M = TypeVar("M", bound=type[Method])


def register(cls: M) -> M:
    """Class decorator: makes the rule known by its `name`."""
    if cls.name in _REGISTRY:
        raise ValueError(f"two methods are called {cls.name!r}")
    _REGISTRY[cls.name] = cls
    return cls


def registry() -> Mapping[str, type[Method]]:
    """Every method by name, sorted."""
    import merganser.methods  # noqa: F401  (registers the families)

    return dict(sorted(_REGISTRY.items()))


def lookup(name: str, where: str = "method") -> type[Method]:
    methods = registry()
    if name not in methods:
        raise RecipeError(f"{where}: unknown method {name!r}{did_you_mean(name, methods)}")
    return methods[name]


def parameters(method: type[Method]) -> dict[str, Parameter]:
    """The hyper-parameters of a rule, in order of declaration."""
    hints = typing.get_type_hints(method)
    found = {}
    for entry in dataclasses.fields(method):
        meta = entry.metadata
        default = meta["default"] if meta["per_model"] else entry.default
        kind = hints[entry.name]
        if meta["per_model"]:
            kind = typing.get_args(kind)[0]
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
        )
    return found


def aliases(method: type[Method]) -> dict[str, str]:
    """Other tools' names for this rule's parameters: alias -> own name."""
    return {alias: f.name for f in dataclasses.fields(method) for alias in f.metadata["aliases"]}


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
