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


def test_an_operand_that_is_used_twice_by_one_step_is_joined_with_it():
    steps = (("LOAD", ()), ("LOAD", ()), ("ADD", (0, 1)), ("SUB", (2, 0)), ("ADDCMUL", (1, 3, 3)), ("STORE", (4,)))
    laid = lay_out(steps)
    assert [op.name for op, _, _ in laid.rows] == ["LOAD", "LOAD", "ADD", "ADDCMUL_SUB", "STORE"]
    (_, (_, a, b, c), fields) = laid.rows[3]
    assert fields == (3, 4)
    assert [a, b, c] == [laid.rows[1][1][0], laid.rows[2][1][0], laid.rows[0][1][0]], "a + x (b − c)²"


def test_results_are_read_from_what_makes_their_operand():
    assert names(("LOAD", ()), ("MUL", (0, 0)), ("SUM", (1,))) == ["LOAD", "SUM_MUL"]
    assert names(("LOAD", ()), ("ABS", (0,)), ("SCAN", (1,))) == ["LOAD", "SCAN_ABS"]
    assert names(("LOAD", ()), ("ABS", (0,)), ("SCAN", (1,)), ("SCAN", (1,))) == ["LOAD", "ABS", "SCAN", "SCAN"]
