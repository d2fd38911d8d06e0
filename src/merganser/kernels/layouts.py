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
    "SIGN_ADDS SIGN_SHRINK ADDCMUL_SUB SUM_MUL SCAN_ABS",
    start=0,
)
#: Steps that leave no value in a register.
_ENDS = {"STORE", "SUM", "NONZERO", "SCAN", "TAKE", "DIVERGENCE", "SUM_MUL", "SCAN_ABS"}
#: Steps that use random bits.
DROPS = {Op["DROP"], Op["DROP_BY_RANK"]}
#: Operations that do two steps at once: a step, the places of one of its operands, and the step that makes it.
_PAIRS = {
    ("SUB", (0,), "LOAD"): Op["LOAD_MINUS"],
    ("ADD", (1,), "MUL"): Op["ADD_MUL"],
    ("MAXS", (0,), "MUL"): Op["MUL_MAXS"],
    ("DIV", (1,), "MAXS"): Op["DIV_MAXS"],
    ("AXPY", (1,), "SIGN"): Op["AXPY_SIGN"],
    ("ADDS", (0,), "SIGN"): Op["SIGN_ADDS"],
    ("SIGN", (0,), "SHRINK"): Op["SIGN_SHRINK"],
    ("ADDCMUL", (1, 2), "SUB"): Op["ADDCMUL_SUB"],
    ("SUM", (0,), "MUL"): Op["SUM_MUL"],
    ("SCAN", (0,), "ABS"): Op["SCAN_ABS"],
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
    order = sorted(wanted - {made for _, made in pairs.values()})
    inputs = {index: _inputs(steps, index, pairs.get(index)) for index in order}
    last = {value: index for index in order for value in inputs[index]}
    register: dict[int, int] = {}
    free: list[int] = []
    rows: list[tuple[Op, tuple[int, int, int, int], tuple[int, ...]]] = []
    for index in order:
        used = [register[value] for value in inputs[index]]
        free += [register[value] for value in dict.fromkeys(inputs[index]) if last[value] == index]
        op, *made = pairs.get(index, (Op[steps[index][0]],))
        to = 0
        if op.name not in _ENDS:
            to = register[index] = free.pop() if free else len({*register.values()})
        first, second, third = [*used, 0, 0, 0][:3]
        rows.append((op, (to, first, second, third), (*made, index)))
    return Arrangement(rows, len({*register.values()}))


def _find_pairs(steps: Sequence[tuple[str, tuple[int, ...]]], wanted: set[int]) -> dict[int, tuple[Op, int]]:
    """Return the steps that run as one with the step that makes an operand, which nothing else uses: for each the
    operation, and that step.
    """
    uses = Counter(value for index in wanted for value in steps[index][1])
    pairs: dict[int, tuple[Op, int]] = {}
    for index in sorted(wanted):
        name, inputs = steps[index]
        for value in dict.fromkeys(inputs):
            places = tuple(place for place, each in enumerate(inputs) if each == value)
            op = _PAIRS.get((name, places, steps[value][0]))
            if op is not None and uses[value] == len(places) and value not in pairs:
                pairs[index] = op, value
                break
    return pairs


def _inputs(steps: Sequence[tuple[str, tuple[int, ...]]], index: int, pair: tuple[Op, int] | None) -> tuple[int, ...]:
    """Return the values that an operation reads: those of a step, one of them replaced by what it is made of."""
    own = steps[index][1]
    if pair is None:
        return own
    made = pair[1]
    place = own.index(made)
    return (*own[:place], *steps[made][1], *(value for value in own[place:] if value != made))
