"""How many components of each task matrix are worth their bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from merganser.checkpoints.base import TensorSpec
from merganser.errors import InputError
from merganser.lazy import np, torch
from merganser.library.storage import Slot, component_bytes
from merganser.methods.matrices import matrix_shape, rank_kept
from merganser.units import parse_size

Kind = Literal["fraction", "energy", "budget"]
KINDS: tuple[str, ...] = get_args(Kind)
Floats: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"


@dataclass(frozen=True)
class RankPolicy:
    """`fraction`: k = max(1, ⌊value · n⌋). `energy`: the least k with Σ_{r≤k} σ_r² ≥ value · ‖Δ‖². `budget`: the expert
    files together take at most `value` bytes, spent where a byte buys the largest share of an expert's energy."""

    kind: Kind
    value: float

    def __post_init__(self) -> None:
        if self.kind != "budget" and not 0 < self.value <= 1:
            raise InputError(f"the {self.kind} must be in (0, 1], got {self.value}")
        if self.kind == "budget" and not 0 <= self.value < math.inf:
            raise InputError(f"the budget must be a number of bytes, got {self.value}")

    @classmethod
    def choose(cls, fraction: float | None, energy: float | None, budget: int | str | None, experts: int) -> RankPolicy:
        """From what the user gave; 1/T of the components if nothing. A budget may be a size such as "1MB"."""
        if isinstance(budget, str):
            budget = parse_size(budget)
        given = {"fraction": fraction, "energy": energy, "budget": budget}
        asked = {kind: value for kind, value in given.items() if value is not None}
        if len(asked) > 1:
            raise InputError(f"choose one of {', '.join(asked)}: each decides the ranks alone")
        for kind, value in asked.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise InputError(f"the {kind} must be a number, got {value!r}")
            return cls(kind, value)  # type: ignore[arg-type]
        return cls("fraction", 1 / experts)

    @property
    def needs_spectra(self) -> bool:
        return self.kind != "fraction"

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "value": self.value}


@dataclass(frozen=True)
class Changed:
    """A tensor of an expert that differs from the base; σ² of its task matrix if it is one and spectra are needed."""

    name: str
    spec: TensorSpec
    matrix: bool
    squares: Floats | None = None


def allot(
    policy: RankPolicy, changed: Mapping[str, Sequence[Changed]], dtype: torch.dtype, rooms: Mapping[str, int]
) -> dict[str, list[Slot]]:
    """Slots of every expert. `rooms` are the bytes of the experts' headers."""
    if policy.kind == "budget":
        return _within(int(policy.value), changed, dtype, rooms)
    return {
        expert: [_slot(tensor, _rank(policy, tensor), dtype) for tensor in tensors]
        for expert, tensors in changed.items()
    }


def _rank(policy: RankPolicy, tensor: Changed) -> int:
    if not tensor.matrix:
        return 0
    n = min(matrix_shape(tensor.spec.shape))
    if policy.kind == "fraction":
        return rank_kept(n, 1, policy.value)
    assert tensor.squares is not None
    cumulative = np.cumsum(tensor.squares)
    return min(n, 1 + int((cumulative < policy.value * cumulative[-1] * (1 - 1e-12)).sum()))


def largest_rank(spec: TensorSpec, dtype: torch.dtype) -> int:
    """The most components that are smaller than the matrix itself."""
    return min(*matrix_shape(spec.shape), (spec.nbytes - 1) // component_bytes(spec, dtype))


def _slot(tensor: Changed, rank: int, dtype: torch.dtype) -> Slot:
    whole = not tensor.matrix or rank > largest_rank(tensor.spec, dtype)
    return Slot(tensor.name, tensor.spec, None if whole else rank)


def _within(
    budget: int, changed: Mapping[str, Sequence[Changed]], dtype: torch.dtype, rooms: Mapping[str, int]
) -> dict[str, list[Slot]]:
    """Greedy by energy share per byte, which is optimal up to the last component bought.

    The steps of a matrix are its components, in order, and last the step to the whole matrix, which is smaller than
    another component would make it and is worth no more per byte than the step before, so that order is kept.
    """
    flat = [(expert, tensor) for expert, tensors in changed.items() for tensor in tensors]
    fixed = sum(rooms.values()) + sum(tensor.spec.nbytes for _, tensor in flat if not tensor.matrix)
    if fixed > budget:
        raise InputError(f"a budget of {budget:,} bytes is too small: tensors that are no matrices need {fixed:,}")
    matrices = [(expert, tensor) for expert, tensor in flat if tensor.matrix]
    gains, costs, owners, values = [], [], [], []
    for index, (expert, tensor) in enumerate(matrices):
        assert tensor.squares is not None
        total = sum(float(np.sum(t.squares)) for t in changed[expert] if t.squares is not None)
        steps = largest_rank(tensor.spec, dtype)
        price = component_bytes(tensor.spec, dtype)
        gain = np.append(tensor.squares[:steps], np.sum(tensor.squares[steps:]))
        cost = np.append(np.full(steps, price), tensor.spec.nbytes - steps * price)
        gains.append(gain)
        costs.append(cost)
        values.append(np.minimum.accumulate(gain / cost) / max(total, 1e-300))
        owners.append(np.full(steps + 1, index))
    if not matrices:
        return {expert: [_slot(t, 0, dtype) for t in tensors] for expert, tensors in changed.items()}
    worth = np.concatenate(gains) > 0
    cost, owner, value = (np.concatenate(parts)[worth] for parts in (costs, owners, values))
    bought = _buy(value, cost.astype(np.int64), owner, len(matrices), budget - fixed)
    slots: dict[str, list[Slot]] = {expert: [] for expert in changed}
    count = iter(bought)
    for expert, tensor in flat:
        if tensor.matrix:
            steps = next(count)
            rank = steps if steps <= largest_rank(tensor.spec, dtype) else min(matrix_shape(tensor.spec.shape)) + 1
            slots[expert].append(_slot(tensor, rank, dtype))
        else:
            slots[expert].append(Slot(tensor.name, tensor.spec, None))
    return slots


def _buy(
    value: Floats,
    cost: np.ndarray[Any, np.dtype[np.int64]],
    owner: np.ndarray[Any, np.dtype[np.int64]],
    owners: int,
    purse: int,
) -> list[int]:
    """Steps taken of each owner, by value per byte."""
    taken = np.zeros(owners, dtype=np.int64)
    order = np.argsort(-value, kind="stable")  # stable: the steps of one owner stay in order among equals
    affordable = int(np.searchsorted(np.cumsum(cost[order]), purse, side="right"))
    np.add.at(taken, owner[order[:affordable]], 1)
    purse -= int(cost[order[:affordable]].sum())
    closed: set[int] = set()
    for step in order[affordable:]:
        who = int(owner[step])
        if who in closed or cost[step] > purse:
            closed.add(who)
            if len(closed) == owners:
                break
            continue
        taken[who] += 1
        purse -= int(cost[step])
    return [int(n) for n in taken]
