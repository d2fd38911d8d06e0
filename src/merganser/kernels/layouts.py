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
    "SHRINK GES SELECT BY_ROW DROP DROP_BY_RANK SUM NONZERO SCAN TAKE",
    start=0,
)
#: Steps that leave no value in a register.
_ENDS = {"STORE", "SUM", "NONZERO", "SCAN", "TAKE"}
#: Steps that use random bits.
DROPS = {Op["DROP"], Op["DROP_BY_RANK"]}


class Arrangement(NamedTuple):
    """The operations to run, each with its registers (to, a, b, c) and the step that has its fields."""

    rows: list[tuple[Op, tuple[int, int, int, int], int]]
    registers: int


@lru_cache(maxsize=64)
def lay_out(steps: tuple[tuple[str, tuple[int, ...]], ...]) -> Arrangement:
    """Choose and arrange the operations of recorded steps; tensors with the same rule differ in numbers only."""
    wanted: set[int] = set()
    for index in reversed(range(len(steps))):
        if steps[index][0] in _ENDS or index in wanted:
            wanted |= {index, *steps[index][1]}
    differences = _find_differences(steps, wanted)
    order = sorted(wanted - {*differences.values()})
    inputs = {index: steps[index][1][1:] if index in differences else steps[index][1] for index in order}
    last = {value: index for index in order for value in inputs[index]}
    register: dict[int, int] = {}
    free: list[int] = []
    rows = []
    for index in order:
        used = [register[value] for value in inputs[index]]
        free += [register[value] for value in dict.fromkeys(inputs[index]) if last[value] == index]
        op = Op.LOAD_MINUS if index in differences else Op[steps[index][0]]
        to = 0
        if op.name not in _ENDS:
            to = register[index] = free.pop() if free else len({*register.values()})
        first, second, third = [*used, 0, 0, 0][:3]
        rows.append((op, (to, first, second, third), differences.get(index, index)))
    return Arrangement(rows, len({*register.values()}))


def _find_differences(steps: Sequence[tuple[str, tuple[int, ...]]], wanted: set[int]) -> dict[int, int]:
    """Return subtractions from a source that is not used otherwise, with its load: one operation does both."""
    uses = Counter(value for index in wanted for value in steps[index][1])
    return {
        index: inputs[0]
        for index, (op, inputs) in enumerate(steps)
        if index in wanted and op == "SUB" and steps[inputs[0]][0] == "LOAD" and uses[inputs[0]] == 1
    }
