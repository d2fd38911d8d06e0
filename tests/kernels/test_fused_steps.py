"""Steps that are run as one, and those that must not be."""

from merganser.kernels.layouts import lay_out


def names(*steps):
    return [op.name for op, _, _ in lay_out(steps).rows]


def test_two_steps_become_one_operation_with_the_fields_of_both():
    laid = lay_out((("LOAD", ()), ("LOAD", ()), ("MUL", (0, 1)), ("MAXS", (2,)), ("STORE", (3,))))
    assert [(op.name, fields) for op, _, fields in laid.rows][2:] == [("MUL_MAXS", (2, 3)), ("STORE", (4,))]


def test_a_value_that_is_used_again_keeps_its_own_step():
    assert names(("LOAD", ()), ("SIGN", (0,)), ("AXPY", (0, 1)), ("ADD", (2, 1)), ("STORE", (3,))) == [
        "LOAD", "SIGN", "AXPY", "ADD", "STORE",
    ]  # fmt: skip


def test_a_chain_is_joined_once():
    steps = (("LOAD", ()), ("LOAD", ()), ("MUL", (0, 1)), ("MAXS", (2,)), ("DIV", (0, 3)), ("STORE", (4,)))
    assert names(*steps) == ["LOAD", "LOAD", "MUL_MAXS", "DIV", "STORE"]
