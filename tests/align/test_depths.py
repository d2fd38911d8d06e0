"""Blocks placed by dynamic programming, and a shallow model in the shape of a deeper one."""

from collections import OrderedDict
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from merganser.align import scramble, stretch, symmetry
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
    with pytest.raises(InputError, match="is not a list of blocks; the model has blocks"):
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


def test_blocks_that_add_to_their_input_in_place():
    class Adding(Residual):
        def forward(self, x):
            x += self.down(torch.tanh(self.up(self.norm(x))))
            return x

    torch.manual_seed(0)
    shallow, deep = Stack(2, block=Adding), Stack(4, block=Adding)
    x = torch.randn(64, 4)
    deep.load_state_dict(stretch(shallow, deep, [x], blocks="blocks").state)
    torch.testing.assert_close(deep(x), shallow(x))


class Convolutions(nn.Module):
    """Residual convolutions whose blocks have names of their own."""

    def __init__(self, depth):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 6, 3, padding=1), nn.Linear(6, 2)
        names = [f"stage{i}" for i in range(depth)]
        self.blocks = nn.Sequential(OrderedDict((name, Convolution()) for name in names))

    def forward(self, x):
        return self.last(self.blocks(self.first(x)).mean((2, 3)))


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(6, 6, 3, padding=1)

    def forward(self, x):
        return x + torch.relu(self.conv(x))


def test_images_are_compared_by_their_channels_in_any_order():
    torch.manual_seed(0)
    module, deep, x = Convolutions(2), Convolutions(3), torch.randn(16, 3, 8, 8)
    twin = scramble(module, symmetry(module, x), seed=1)
    np.testing.assert_allclose(stretch(module, twin, [x], blocks="blocks").similarity.diagonal(), 1.0)
    stretched = stretch(module, deep, [x], blocks="blocks")
    deep.load_state_dict(stretched.state)
    torch.testing.assert_close(deep(x), module(x))


def test_blocks_that_differ_and_activations_that_are_not_finite_are_refused():
    x, broken, odd = torch.randn(8, 4), Stack(2), Stack(3)
    with torch.no_grad():
        broken.embed.weight[0] = torch.nan
    with pytest.raises(InputError, match="not finite"):
        stretch(broken, Stack(3), [x], blocks="blocks")
    with pytest.raises(InputError, match="there are no batches"):
        stretch(Stack(2), Stack(3), [], blocks="blocks")
    odd.blocks[0].up, odd.blocks[0].down = nn.Linear(6, 5), nn.Linear(5, 6)
    with pytest.raises(InputError, match=r"'blocks.0' of the first model and .* in 'blocks.0' of the second"):
        stretch(Stack(2), odd, [x], blocks="blocks")
