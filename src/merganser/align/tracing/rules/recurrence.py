"""Recurrent layers: the units of a hidden state may be reordered, in every gate alike.

A cell reads its input and its own state, `gates = x W_ihᵀ + h W_hhᵀ + b`, with rows (gate, unit) and the units of
every gate those of the state. An LSTM may project its state: then the cell keeps its own units, and the projected ones
are read and returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from merganser.align.tracing.calls import Call, OutputAxes, Unsupported, rule
from merganser.align.tracing.dims import ONE, Axes, Dim, concat, family, pin
from merganser.align.tracing.rules.contraction import einsum
from merganser.align.tracing.rules.convolution import unify_sized
from merganser.align.tracing.rules.joining import at_index
from merganser.align.tracing.unification import split

GATES = {"gru": 3, "lstm": 4, "rnn_tanh": 1, "rnn_relu": 1}


@dataclass(frozen=True, slots=True)
class Cell:
    """The weights of one layer in one direction."""

    w_ih: Axes
    w_hh: Axes
    biases: Sequence[Axes]
    projection: Axes | None = None

    def units(self, call: Call, gates: int, x: Sequence[Dim]) -> tuple[Dim, Dim]:
        """Units of the state it returns and of the cell inside (the same without a projection), when it reads `x`."""
        rows = [self.w_ih[0], self.w_hh[0], *(bias[0] for bias in self.biases)]
        gate, unit = split(rows[0], (gates, rows[0].size // gates))
        pin(gate)
        for other in rows[1:]:
            unify_sized(rows[0], other)
        call.forbid([gate], [unit])
        state = self.projection[0] if self.projection is not None else unit
        batch = "tb"[-len(x) + 1 :] if len(x) > 1 else ""
        einsum(call, [x, [unit, self.w_ih[1]]], [batch + "i", "ui"], batch + "u")
        einsum(call, [[state], [unit, self.w_hh[1]]], ["s", "us"], "u")
        if self.projection is not None:
            einsum(call, [[unit], self.projection], ["u", "su"], "s")
        call.mix([state, unit, self.w_ih[1]])
        return state, unit


@rule("gru_cell", "lstm_cell", "rnn_tanh_cell", "rnn_relu_cell")
def cell(call: Call) -> OutputAxes:
    x, hidden = call["input"], call["hx"]
    before = hidden if type(hidden) is list else [hidden]
    biases = [bias for bias in (call["b_ih"], call["b_hh"]) if bias is not None]
    unit, _ = Cell(call["w_ih"], call["w_hh"], biases).units(call, GATES[call.op.removesuffix("_cell")], x)
    for state in before:
        unify_sized(unit, state[-1])
    result = Axes([*x[:-1], unit])
    return [result] * len(before) if type(hidden) is list else result


@rule(*GATES)
def layers(call: Call) -> OutputAxes:
    """Layers one after another; with two directions, each has units of its own, and what follows reads both."""
    x, hidden, gates = call["input"], call["hx"], GATES[call.op]
    initial = hidden if type(hidden) is list else [hidden]
    directions = 2 if call["bidirectional"] else 1
    cells = _cells(call["params"], call["has_biases"], call["num_layers"] * directions)
    time = 1 if call["batch_first"] and len(x) == 3 else 0
    pin(x[time])
    sequence, final = x, []
    for layer in range(call["num_layers"]):
        own = cells[layer * directions : (layer + 1) * directions]
        units = [one.units(call, gates, sequence) for one in own]
        final += units
        sequence = Axes([*x[:-1], concat([state for state, _ in units])])
    for place, found in enumerate(final):
        for state, unit in zip(initial, found, strict=False):
            unify_sized(unit, at_index(state, 0, place)[-1])
    batch = [dim for d, dim in enumerate(x[:-1]) if d != time]
    index = Dim(len(final), pinned=True) if len(final) > 1 else ONE
    states = [Axes([index, *batch, _at_each(index, column)]) for column in zip(*final, strict=True)]
    return [sequence, *states[: len(initial)]]


def _at_each(index: Dim, units: Sequence[Dim]) -> Dim:
    return family(index, units) if len(units) > 1 and units[0].size != 1 else units[0]


def _cells(params: Sequence[Axes], biased: bool, count: int) -> list[Cell]:
    """The weights in torch's order: w_ih, w_hh, b_ih, b_hh, w_hr, cell by cell."""
    size, left = divmod(len(params), count)
    plain = 4 if biased else 2
    if left or size not in (plain, plain + 1):
        raise Unsupported
    own = [params[i : i + size] for i in range(0, len(params), size)]
    return [Cell(p[0], p[1], p[2:plain], p[plain] if size > plain else None) for p in own]
