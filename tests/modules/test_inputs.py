"""Batches: split by samples and put together again."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from merganser.errors import InputError
from merganser.modules.inputs import Inputs, gather


def test_a_type_error_of_the_module_itself_stays_one():
    class Broken(nn.Module):
        def forward(self, x):
            return x + None

    with pytest.raises(TypeError, match="unsupported operand"):
        Inputs((torch.ones(1),)).run(Broken())


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=9),
    st.integers(1, 3),
)
@settings(max_examples=25, deadline=None)
def test_gather_undoes_grouping(groups, width):
    values = torch.arange(len(groups) * width, dtype=torch.float32).reshape(len(groups), width)
    inputs = Inputs((values,), {"extra": {"y": values + 1}, "table": torch.zeros(len(groups) + 1)})
    places = [torch.tensor([i for i, g in enumerate(groups) if g == which]) for which in sorted(set(groups))]
    parts = [(index, inputs.select(index)) for index in places]
    outputs = [(index, {"a": part.args[0], "b": (part.kwargs["extra"]["y"], None)}) for index, part in parts]
    whole = gather(outputs, len(groups))
    assert torch.equal(whole["a"], values)
    assert torch.equal(whole["b"][0], values + 1)
    assert whole["b"][1] is None
    assert all(part.kwargs["table"].shape == (len(groups) + 1,) for _, part in parts)


def test_outputs_that_cannot_be_gathered_say_so():
    parts = [(torch.tensor([0]), object()), (torch.tensor([1]), object())]
    with pytest.raises(InputError, match="route per batch"):
        gather(parts, 2)
    with pytest.raises(InputError, match="needs a batch"):
        _ = Inputs((3,)).size
