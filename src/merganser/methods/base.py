"""The interface of merging rules: a frozen record of hyper-parameters with one function per tensor."""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeVar

from merganser.checkpoints.base import TensorSpec
from merganser.errors import RecipeError
from merganser.lazy import np, torch

if TYPE_CHECKING:
    from torch import Tensor

Reach = Literal["elementwise", "reduce_map", "whole"]
Reduction = Any
T = TypeVar("T")


@dataclass(frozen=True)
class Group:
    """One output tensor, or a block of its rows, with everything a rule may use.

    Tensors are float32 (float64 if a source is) and must not be modified. `offset` is the flat index of
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
    prepared: Reduction = None
    #: Whether infinite entries and NaN have been excluded.
    finite: bool = True
    #: Factor of each task vector, for rules that need a common norm; None leaves them unchanged.
    gains: tuple[float, ...] = ()

    @property
    def anchor(self) -> Tensor:
        """Return the base's tensor, for rules that need one."""
        assert self.base is not None, "the plan guarantees a base to rules that need one"
        return self.base

    def deltas(self) -> list[Tensor]:
        """Return the task vectors Δ_t = θ_t − θ_0, times their gains, as fresh contiguous tensors that may be
        modified.
        """
        deltas = [(model - self.anchor).contiguous() for model in self.models]
        return [delta.mul_(gain) for delta, gain in zip(deltas, self.gains, strict=True)] if self.gains else deltas

    def random_bits(self, model: int) -> Tensor:
        """Return uniform signed 16-bit integers, one per element of this block; `bits < threshold(p)` has probability
        p.

        The stream is keyed by (seed, tensor name, model label) and addressed by element: it depends neither on blocks
        and threads nor on the order of the models.
        """
        stream = self.generator(model)
        stream.advance(self.offset // 4)
        skip, count = self.offset % 4, self.models[model].numel()
        words = stream.random_raw((skip + count + 3) // 4)
        bits = torch.from_numpy(words.view(np.int16)[skip : skip + count]).view(self.models[model].shape)
        return bits.to(self.models[model].device)

    def generator(self, model: int) -> np.random.PCG64DXSM:
        """Return the generator of a model's random bits, four per word, at the tensor's first element."""
        key = f"{self.seed}\0{self.name}\0{self.labels[model]}".encode()
        return np.random.PCG64DXSM(int.from_bytes(hashlib.blake2b(key, digest_size=16).digest(), "little"))


def threshold(probability: float) -> int:
    """Return the integer that uniform signed 16-bit integers are below with this probability, rounded to 2⁻¹⁶."""
    return round(probability * 2**16) - 2**15


class Blocks(Protocol):
    """The blocks of one output tensor, readable any number of times, in the order of their elements.

    How a tensor is split depends on its shape alone. Matrices are split between rows, larger tensors between rows of
    the first axis too, unless such a row has more than 2¹⁶ elements; vectors anywhere. `name`, `labels`, `shape` and
    `prepared` are those of every block, known without reading one.
    """

    @property
    def name(self) -> str: ...

    @property
    def labels(self) -> tuple[str, ...]: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def prepared(self) -> Reduction: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Group:
        """Return one block alone: a sample, or a second look, without a pass over the others."""
        ...

    def __iter__(self) -> Iterator[Group]: ...

    def map(self, function: Callable[[Group], T], only: int | None = None, stride: int = 1) -> list[T]:
        """Apply `function` to every block, or to one alone, in block order, possibly in parallel.

        With a stride, use a sample of about one in `stride` entries: a part of every block, or whole blocks.
        """
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
    #: "required": works on task vectors; "optional"; "none": a base in the recipe is only the template.
    base: ClassVar[Literal["required", "optional", "none"]] = "none"
    models: ClassVar[tuple[int, float]] = (1, math.inf)
    #: Kinds of side checkpoints a rule needs per model, e.g. ("fisher",).
    statistics: ClassVar[tuple[str, ...]] = ()
    #: Other names of this rule in recipes.
    also: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def check_inputs(cls, models: int, base: bool, where: str = "") -> None:
        """Raise an error if this rule cannot merge so many models, with or without a base."""
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
        """Return the shape of a statistic of that kind for a tensor of this shape."""
        return shape

    def reduce(self, blocks: Blocks) -> Reduction:
        """Return the state that `merge` needs about the whole tensor (reduce_map only)."""
        return None

    def reduced_by(self) -> Hashable:
        """Return what `reduce` depends on besides the tensors, so that its state can serve another merge."""
        return self

    @abstractmethod
    def merge(self, group: Group, state: Reduction = None) -> Tensor:
        """Return the output for this block (or whole tensor) in the dtype of the inputs; may be an input itself."""

    def prepare(self, tensors: Iterable[tuple[Mapping[str, Any], Blocks]]) -> Reduction:
        """Compute global quantities from every tensor first; a JSON value kept with the plan."""
        return None

    def needs_preparation(self) -> bool:
        return False

    @property
    def equalizes(self) -> bool:
        """Whether the task vectors are scaled to a common norm first (`Group.gains`)."""
        return False

    @property
    def looks_first(self) -> bool:
        """Whether every tensor is read before the first is merged."""
        return self.equalizes or self.needs_preparation()

    def scratch(self, spec: TensorSpec, models: int) -> int:
        """Return the bytes that a `whole` rule holds beyond its inputs; `spec` has the arithmetic's dtype."""
        return spec.nbytes * (models + 2)


@dataclass(frozen=True)
class Thinning(Method):
    """A rule in two steps: it thins the task vectors without regard to their weights, and combines what is left."""

    @abstractmethod
    def thinned_by(self) -> Hashable:
        """Return what `thin` depends on besides tensors and state; None if it drops nothing and keeping its results
        saves no work.
        """

    @abstractmethod
    def thin(self, group: Group, state: Reduction = None) -> list[Tensor]:
        """Return the thinned task vectors of this block."""

    @abstractmethod
    def combine(self, group: Group, deltas: list[Tensor]) -> Tensor:
        """Return the output for this block from its base and the thinned task vectors, which may be overwritten."""

    def merge(self, group: Group, state: Reduction = None) -> Tensor:
        return self.combine(group, self.thin(group, state))
