"""Choose the operations of a recorded rule and the registers they use; both depend on its structure alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

#: The steps of `tiles.c`, in the order of its enumeration.
Op = IntEnum(
    "Op",
    "LOAD LOAD_MINUS STORE FILL ADD SUB MUL DIV MAX MIN COPYSIGN AXPY ADDCMUL LERP ADDS MULS MAXS MINS ABS NEG SIGN "
    "SHRINK GES SELECT BY_ROW DROP DROP_BY_RANK SUM NONZERO SCAN TAKE DIVERGENCE ADD_MUL MUL_MAXS DIV_MAXS AXPY_SIGN "
    "SIGN_ADDS",
    start=0,
)
#: Steps that leave no value in a register.
_ENDS = {"STORE", "SUM", "NONZERO", "SCAN", "TAKE", "DIVERGENCE"}
#: Steps that use random bits.
DROPS = {Op["DROP"], Op["DROP_BY_RANK"]}
#: Operations that do two steps at once: a step, the place of an operand, and the step that makes this operand.
_PAIRS = {
    ("SUB", 0, "LOAD"): Op["LOAD_MINUS"],
    ("ADD", 1, "MUL"): Op["ADD_MUL"],
    ("MAXS", 0, "MUL"): Op["MUL_MAXS"],
    ("DIV", 1, "MAXS"): Op["DIV_MAXS"],
    ("AXPY", 1, "SIGN"): Op["AXPY_SIGN"],
    ("ADDS", 0, "SIGN"): Op["SIGN_ADDS"],
}


class Arrangement(NamedTuple):
    """The operations to run, each with its registers (to, a, b, c) and the steps that have its fields."""

    rows: list[tuple[Op, tuple[int, int, int, int], tuple[int, ...]]]
    registers: int


@lru_cache(maxsize=64)
def lay_out(steps: tuple[tuple[str, tuple[int, ...]], ...]) -> Arrangement:
    """Choose and arrange the operations of recorded steps; tensors with the same rule differ in numbers only."""
    wanted: set[int] = set()
    for index in reversed(range(len(steps))):
        if steps[index][0] in _ENDS or index in wanted:
            wanted |= {index, *steps[index][1]}
    pairs = _find_pairs(steps, wanted)
    order = sorted(wanted - {steps[index][1][place] for index, place in pairs.items()})
    inputs = {index: _inputs(steps, index, pairs.get(index)) for index in order}
    last = {value: index for index in order for value in inputs[index]}
    register: dict[int, int] = {}
    free: list[int] = []
    rows: list[tuple[Op, tuple[int, int, int, int], tuple[int, ...]]] = []
    for index in order:
        used = [register[value] for value in inputs[index]]
        free += [register[value] for value in dict.fromkeys(inputs[index]) if last[value] == index]
        name, operands = steps[index]
        place = pairs.get(index)
        op = Op[name] if place is None else _PAIRS[name, place, steps[operands[place]][0]]
        to = 0
        if op.name not in _ENDS:
            to = register[index] = free.pop() if free else len({*register.values()})
        first, second, third = [*used, 0, 0, 0][:3]
        rows.append((op, (to, first, second, third), (index,) if place is None else (operands[place], index)))
    return Arrangement(rows, len({*register.values()}))


def _find_pairs(steps: Sequence[tuple[str, tuple[int, ...]]], wanted: set[int]) -> dict[int, int]:
    """Return the steps that run as one with the step that makes an operand, which nothing else uses: for each the
    place of the operand.
    """
    uses = Counter(value for index in wanted for value in steps[index][1])
    pairs: dict[int, int] = {}
    for index in sorted(wanted):
        op, inputs = steps[index]
        for place, value in enumerate(inputs):
            if (op, place, steps[value][0]) in _PAIRS and uses[value] == 1 and value not in pairs:
                pairs[index] = place
                break
    return pairs


def _inputs(steps: Sequence[tuple[str, tuple[int, ...]]], index: int, place: int | None) -> tuple[int, ...]:
    """Return the values that an operation reads: those of a step, one of them replaced by what it is made of."""
    own = steps[index][1]
    return own if place is None else (*own[:place], *steps[own[place]][1], *own[place + 1 :])
