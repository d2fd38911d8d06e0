"""The contract of rules for matrices: `combine` may return any matrix, also one that it keeps."""

from dataclasses import dataclass

import pytest
import torch

from merganser.methods.base import Group
from merganser.methods.matrices import MatrixRule

KEPT = torch.eye(3)
RESULTS = {
    "one of the inputs": lambda deltas: deltas[0],
    "a view of an input": lambda deltas: deltas[1].T,
    "a matrix that stays": lambda deltas: KEPT,
    "one number for all entries": lambda deltas: torch.ones(1, 1).expand(3, 3),
}


@pytest.mark.parametrize("combined", RESULTS.values(), ids=RESULTS)
def test_the_base_is_added_to_a_new_matrix(combined):
    @dataclass(frozen=True)
    class Rule(MatrixRule):
        def combine(self, deltas):
            return combined(deltas)

    base, *models = torch.randn(3, 3, 3).unbind()
    before = [tensor.clone() for tensor in (base, *models, KEPT)]
    expected = base + 2 * combined(torch.stack(models) - base)
    torch.testing.assert_close(Rule(scale=2.0).merge(Group("w", tuple(models), base)), expected)
    assert all(map(torch.equal, (base, *models, KEPT), before))
