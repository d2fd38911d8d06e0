"""Blocks placed by dynamic programming, and a shallow model in the shape of a deeper one."""

from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from merganser.align import stretch
from merganser.align.depths import place_blocks
from merganser.errors import InputError


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self, depth, width=6, block=Residual):
        super().__init__()
        self.embed, self.head = nn.Linear(4, width), nn.Linear(width, 3)
        self.blocks = nn.Sequential(*(block(width) for _ in range(depth)))

    def forward(self, x):
        return self.head(self.blocks(self.embed(x)))


@given(st.integers(1, 4), st.integers(0, 3), st.integers(0, 10**6))
def test_places_equal_those_of_an_exhaustive_search(few, more, seed):
    similarity = np.random.default_rng(seed).random((few, few + more))
    plan = place_blocks(similarity)
    assert [source for source in plan if source is not None] == list(range(few))
    value = sum(similarity[source, place] for place, source in enumerate(plan) if source is not None)
    choices = combinations(range(few + more), few)
    assert value == pytest.approx(max(sum(similarity[i, j] for i, j in enumerate(chosen)) for chosen in choices))


def test_the_function_stays_and_planted_blocks_are_found():
    torch.manual_seed(0)
    deep, shallow = Stack(5), Stack(3)
    state = {name: t for name, t in deep.state_dict().items() if not name.startswith("blocks.")}
    for block in (1, 3):  # in the deeper model these add next to nothing
        nn.init.normal_(deep.blocks[block].down.weight, std=1e-4)
        nn.init.zeros_(deep.blocks[block].down.bias)
    for mine, theirs in enumerate((0, 2, 4)):
        state |= {f"blocks.{mine}.{n}": t for n, t in deep.blocks[theirs].state_dict().items()}
    shallow.load_state_dict(state)
    x = torch.randn(64, 4)
    found = stretch(shallow, deep, [x], blocks="blocks")
    again = Stack(5)
    again.load_state_dict(found.state)
    torch.testing.assert_close(again(x), shallow(x))
    assert [source for source in found.plan if source is not None] == [0, 1, 2]
    for place in (place for place, source in enumerate(found.plan) if source is None):
        assert not again.blocks[place].down.weight.any()
        torch.testing.assert_close(again.blocks[place].up.weight, deep.blocks[place].up.weight)
    assert found.similarity[0, 0] == pytest.approx(1.0)


def test_a_model_of_transformers():
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    torch.manual_seed(0)
    shallow, deep = (
        transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=n, **sizes)).eval() for n in (2, 3)
    )
    tokens = torch.arange(30).reshape(3, 10)
    found = stretch(shallow, deep, [{"input_ids": tokens, "use_cache": False}], blocks="model.layers")
    zero = [name for name, t in found.state.items() if not t.any()]
    assert [name.split(".", 3)[3] for name in zero] == ["self_attn.o_proj.weight", "mlp.down_proj.weight"]
    deep.load_state_dict(found.state)
    torch.testing.assert_close(deep(tokens).logits, shallow(tokens).logits)


def test_what_cannot_be_stretched_is_refused():
    x = torch.randn(8, 4)
    with pytest.raises(InputError, match="the shallower one first"):
        stretch(Stack(3), Stack(2), [x], blocks="blocks")
    with pytest.raises(InputError, match="no list of blocks; the model has blocks"):
        stretch(Stack(2), Stack(3), [x], blocks="layers")
    with pytest.raises(InputError, match="is .* in one model"):
        stretch(Stack(2, 6), Stack(3, 8), [x], blocks="blocks")
    with pytest.raises(InputError, match="not weights"):
        stretch(Stack(2).state_dict(), Stack(3), [x], blocks="blocks")

    strange, other = Stack(2), Stack(3)
    with torch.no_grad():  # one sees the first two inputs, the other the last two
        strange.embed.weight[:, 2:] = 0
        other.embed.weight[:, :2] = 0
    with pytest.raises(InputError, match="block 0 fits nowhere"):
        stretch(strange, other, [torch.randn(2000, 4)], blocks="blocks")

    class Plain(Residual):
        def forward(self, x):
            return self.down(torch.tanh(self.up(self.norm(x))))

    with pytest.raises(InputError, match="not residual"):
        stretch(Stack(2, block=Plain), Stack(3, block=Plain), [x], blocks="blocks")
