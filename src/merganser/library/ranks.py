"""Choose the rank of each task matrix."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from merganser.checkpoints.base import TensorSpec
from merganser.errors import InputError
from merganser.lazy import np, torch
from merganser.library.choosing import Floats, buy
from merganser.library.codes.catalogue import check_codes
from merganser.library.storage import Slot, component_bytes
from merganser.methods.matrices import matrix_shape, rank_kept
from merganser.units import parse_size

PolicyKind = Literal["fraction", "energy", "budget"]
KINDS: tuple[str, ...] = get_args(PolicyKind)


@dataclass(frozen=True)
class RankPolicy:
    """A rule for ranks.

    `fraction`: k = max(1, ⌊value · n⌋). `energy`: the smallest k with Σ_{r≤k} σ_r² ≥ value · ‖Δ‖². `budget`: the expert
    files together take at most `value` bytes, allocated where a byte gains the largest share of an expert's energy: to
    ranks, or to any of the `codes`.
    """

    kind: PolicyKind
    value: float
    codes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.kind != "budget" and not 0 < self.value <= 1:
            raise InputError(f"the {self.kind} must be in (0, 1], got {self.value}")
        if self.kind == "budget" and not 0 <= self.value < math.inf:
            raise InputError(f"the budget must be a number of bytes, got {self.value}")

    @classmethod
    def choose(cls, fraction: float | None, energy: float | None, budget: int | str | None, experts: int) -> RankPolicy:
        """Return the policy of the user's options; by default 1/T of the components. A budget may be a size such as
        "1MB".
        """
        if isinstance(budget, str):
            budget = parse_size(budget)
        given = {"fraction": fraction, "energy": energy, "budget": budget}
        asked = {kind: value for kind, value in given.items() if value is not None}
        if len(asked) > 1:
            raise InputError(f"choose one of {', '.join(asked)}: each sets the ranks")
        for kind, value in asked.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise InputError(f"the {kind} must be a number, got {value!r}")
            return cls(kind, value)  # type: ignore[arg-type]
        return cls("fraction", 1 / experts)

    @property
    def needs_spectra(self) -> bool:
        return self.kind != "fraction"

    def to_dict(self) -> dict[str, Any]:
        plain: dict[str, Any] = {"kind": self.kind, "value": self.value}
        return plain | {"codes": " ".join(self.codes)} if self.codes else plain


def with_codes(policy: RankPolicy, codes: Sequence[str] | None, default: Sequence[str]) -> RankPolicy:
    """Return a policy that chooses among codes: the given ones, or by default, if it is a budget, `default`.

    Raises:
        InputError: If codes are given without a budget, or are unknown.
    """
    if codes is not None and policy.kind != "budget":
        raise InputError("codes are chosen within a budget; give a budget in bytes")
    chosen = check_codes(codes) if codes is not None else tuple(default)
    return replace(policy, codes=chosen) if policy.kind == "budget" else policy


@dataclass(frozen=True)
class Changed:
    """A tensor of an expert that differs from the base, with σ² of its task matrix if spectra are needed.

    `coded` tells whether a code can store the difference; new tensors and integers have none.
    """

    name: str
    spec: TensorSpec
    matrix: bool
    squares: Floats | None = None
    coded: bool = False


def allot(
    policy: RankPolicy, changed: Mapping[str, Sequence[Changed]], dtype: torch.dtype, rooms: Mapping[str, int]
) -> dict[str, list[Slot]]:
    """Return the slots of every expert. `rooms` are the bytes of the experts' headers."""
    if policy.kind == "budget":
        return _allot_within(int(policy.value), changed, dtype, rooms)
    return {
        expert: [_make_slot(tensor, _choose_rank(policy, tensor), dtype) for tensor in tensors]
        for expert, tensors in changed.items()
    }


def _choose_rank(policy: RankPolicy, tensor: Changed) -> int:
    if not tensor.matrix:
        return 0
    n = min(matrix_shape(tensor.spec.shape))
    if policy.kind == "fraction":
        return rank_kept(n, 1, policy.value)
    assert tensor.squares is not None
    cumulative = np.cumsum(tensor.squares)
    return min(n, 1 + int((cumulative < policy.value * cumulative[-1] * (1 - 1e-12)).sum()))


def largest_rank(spec: TensorSpec, dtype: torch.dtype) -> int:
    """Return the largest number of components that is smaller than the matrix itself."""
    return min(*matrix_shape(spec.shape), (spec.nbytes - 1) // component_bytes(spec, dtype))


def _make_slot(tensor: Changed, rank: int, dtype: torch.dtype) -> Slot:
    whole = not tensor.matrix or rank > largest_rank(tensor.spec, dtype)
    return Slot(tensor.name, tensor.spec, None if whole else rank)


def _allot_within(
    budget: int, changed: Mapping[str, Sequence[Changed]], dtype: torch.dtype, rooms: Mapping[str, int]
) -> dict[str, list[Slot]]:
    """Choose greedily by energy share per byte, which is optimal up to the last component.

    The steps of a matrix are its components, in order, and finally the step to the whole matrix. The whole matrix is
    smaller than one more component would make it and gains no more per byte than the step before, so that the order
    holds.
    """
    flat = [(expert, tensor) for expert, tensors in changed.items() for tensor in tensors]
    fixed = sum(rooms.values()) + sum(tensor.spec.nbytes for _, tensor in flat if not tensor.matrix)
    if fixed > budget:
        raise InputError(f"a budget of {budget:,} bytes is too small: tensors that are not matrices need {fixed:,}")
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
        return {expert: [_make_slot(t, 0, dtype) for t in tensors] for expert, tensors in changed.items()}
    worth = np.concatenate(gains) > 0
    cost, owner, value = (np.concatenate(parts)[worth] for parts in (costs, owners, values))
    bought = buy(value, cost.astype(np.int64), owner, len(matrices), budget - fixed)
    slots: dict[str, list[Slot]] = {expert: [] for expert in changed}
    count = iter(bought)
    for expert, tensor in flat:
        if tensor.matrix:
            steps = next(count)
            rank = steps if steps <= largest_rank(tensor.spec, dtype) else min(matrix_shape(tensor.spec.shape)) + 1
            slots[expert].append(_make_slot(tensor, rank, dtype))
        else:
            slots[expert].append(Slot(tensor.name, tensor.spec, None))
    return slots
