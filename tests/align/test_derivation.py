"""The symmetries of hand-made networks are the expected ones, neither fewer nor more."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from merganser.align import Symmetry, symmetry
from merganser.errors import InputError


def freedom(found: Symmetry) -> dict[str, tuple[int, ...]]:
    """Every atom with the shape of its permutation array."""
    return {name: found.shape(name) for name in found.atoms}


class Net(nn.Module):
    """A forward pass written as a function of the module."""

    def __init__(self, forward: Callable[[nn.ModuleDict, Tensor], Tensor], **children: nn.Module) -> None:
        super().__init__()
        self.m = nn.ModuleDict(children)
        self.function = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.m, x)


def test_mlp_with_batch_norm() -> None:
    net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 6), nn.BatchNorm1d(6), nn.GELU(), nn.Linear(6, 3))
    found = symmetry(net, torch.randn(4, 5))
    assert freedom(found) == {"0": (8,), "2": (6,)}
    assert dict(found.occurrences)["2"] == tuple(
        [("2.weight", 0), ("2.bias", 0)]
        + [(f"3.{name}", 0) for name in ("weight", "bias", "running_mean", "running_var")]
        + [("5.weight", 1)]
    )
    assert found.buffers == {"3.running_mean", "3.running_var", "3.num_batches_tracked"}
    assert net.training


def test_flatten_after_convolution() -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 9, 7), nn.ReLU(), nn.Linear(7, 2)
    )
    found = symmetry(net, torch.randn(2, 3, 8, 8))
    assert freedom(found) == {"0": (8,), "4": (7,)}
    (segment,) = found.axes["4.weight"][1]
    assert [(f.atom, f.size) for f in segment.factors] == [("0", 8), (None, 9)]


def test_residual_stream_is_one_atom() -> None:
    def forward(m: nn.ModuleDict, x: Tensor) -> Tensor:
        x = m["stem"](x)
        x = x + m["b"](F.relu(m["a"](x)))
        return m["head"]((x + m["c"](x)).mean((2, 3)))

    children = {"stem": nn.Conv2d(3, 6, 3), "a": nn.Conv2d(6, 4, 1), "b": nn.Conv2d(4, 6, 1)}
    net = Net(forward, **children, c=nn.Conv2d(6, 6, 1), head=nn.Linear(6, 2))
    assert freedom(symmetry(net, torch.randn(2, 3, 5, 5))) == {"m.stem": (6,), "m.a": (4,)}


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_depthwise_and_transposed_convolutions(rank: int) -> None:
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[rank - 1]
    back = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[rank - 1]
    net = nn.Sequential(
        conv(2, 6, 1),
        conv(6, 6, 3, groups=6, padding=1),
        nn.ReLU(),
        conv(6, 4, 1),
        back(4, 5, 2),
        nn.Tanh(),
        back(5, 2, 1),
    )
    assert freedom(symmetry(net, torch.randn(2, 2, *[4] * rank))) == {"0": (6,), "3": (4,), "4": (5,)}


def test_grouped_convolution_permutes_groups_and_inside_groups() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 12, 3, groups=4), nn.ReLU(), nn.Conv2d(12, 2, 1))
    found = freedom(symmetry(net, torch.randn(2, 3, 6, 6)))
    # Inputs of a group: one order for all groups, for the weight has them on another axis than the groups.
    assert found == {"0:group": (4,), "0:outer": (2,), "1": (4, 3)}
    net = nn.Sequential(nn.Conv1d(3, 8, 1), nn.ConvTranspose1d(8, 12, 3, groups=4), nn.ReLU(), nn.Conv1d(12, 2, 1))
    assert freedom(symmetry(net, torch.randn(2, 3, 6))) == {"0:group": (4,), "0:inner": (4, 2), "1": (3,)}


def test_depthwise_with_multiplier() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 8, 3, groups=4), nn.ReLU(), nn.Conv2d(8, 2, 1))
    assert freedom(symmetry(net, torch.randn(2, 3, 6, 6))) == {"0": (4,), "1": (4, 2)}


def test_group_norm_nests_channels_in_groups() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 2, 1))
    assert freedom(symmetry(net, torch.randn(2, 3, 6, 6))) == {"0:group": (2,), "0:inner": (2, 4)}


def test_concatenation_has_a_segment_for_each_input() -> None:
    def forward(m: nn.ModuleDict, x: Tensor) -> Tensor:
        a = F.relu(m["a"](x))
        b = F.relu(m["b"](torch.cat([x, a], 1)))
        return m["head"](torch.cat([x, a, b], 1)).mean((2, 3))

    net = Net(forward, a=nn.Conv2d(3, 4, 1), b=nn.Conv2d(7, 5, 1), head=nn.Conv2d(12, 2, 1))
    found = symmetry(net, torch.randn(2, 3, 4, 4))
    assert freedom(found) == {"m.a": (4,), "m.b": (5,)}
    segments = found.axes["m.head.weight"][1]
    assert [[f.atom for f in s.factors] for s in segments] == [[None], ["m.a"], ["m.b"]]
    assert [s.offset for s in segments] == [0, 3, 7]


def test_concatenation_taken_apart_again_and_residual_around_it() -> None:
    def forward(m: nn.ModuleDict, x: Tensor) -> Tensor:
        whole = m["wide"](x)
        left, right = whole.split([4, 6], -1)
        return m["head"](whole + torch.cat([m["l"](left), F.relu(right)], -1))

    net = Net(forward, wide=nn.Linear(3, 10), l=nn.Linear(4, 4), head=nn.Linear(10, 2))
    assert sorted(freedom(symmetry(net, torch.randn(2, 3))).values()) == [(4,), (6,)]


def test_gated_units_are_paired() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(4, 12), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(F.glu(self.up(x)) + self.up(x).chunk(2, -1)[0])

    found = symmetry(Gated(), torch.randn(2, 4))
    assert freedom(found) == {"up": (6,)}
    assert len(found.axes["up.weight"][0]) == 2


def test_tied_weights_are_one_weight() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.mix = nn.Embedding(11, 6), nn.Linear(6, 6)
            self.head = nn.Linear(6, 11, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embedding(tokens)
            return self.head(x + F.relu(self.mix(x)))

    found = symmetry(Tied(), torch.randint(11, (2, 5)))
    assert freedom(found) == {"embedding": (6,)}
    assert found.axes["head.weight"] == found.axes["embedding.weight"]
    assert found.aliases == {"head.weight": "embedding.weight"}
    assert "head.weight" not in found.objective


def test_memory_seen_in_two_ways_is_pinned() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(4, 6)
            self.down = nn.Linear(6, 4)
            self.down.weight = nn.Parameter(self.up.weight.detach().T)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(F.relu(self.up(x)))

    assert freedom(symmetry(Shared(), torch.randn(2, 4), self_test=False)) == {}


class Attention(nn.Module):
    """Attention over heads, its projection laid out as asked: 'three' q, k, v blocks, or q, k, v inside each 'head'."""

    def __init__(self, layout: str = "three", mix: str = "sdpa", slopes: bool = False) -> None:
        super().__init__()
        self.layout, self.mix, self.slopes = layout, mix, slopes
        self.embed, self.qkv = nn.Linear(5, 12), nn.Linear(12, 36)
        self.out, self.head = nn.Linear(12, 12), nn.Linear(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        fused = self.qkv(x)
        if self.layout == "three":
            q, k, v = fused.unflatten(-1, (3, 3, 4)).permute(2, 0, 3, 1, 4).unbind(0)
        elif self.layout == "chunk":
            q, k, v = (part.unflatten(-1, (3, 4)).transpose(1, 2) for part in fused.chunk(3, -1))
        else:
            q, k, v = fused.unflatten(-1, (3, 12)).transpose(1, 2).chunk(3, -1)
        if self.mix == "sdpa":
            bias = torch.tensor([1.0, 0.5, 0.25])[:, None, None] * torch.arange(x.shape[1]) if self.slopes else None
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        elif self.mix == "einsum":
            mixed = torch.einsum("bhqk,bhkd->bhqd", torch.einsum("bhqd,bhkd->bhqk", q, k).softmax(-1), v)
        else:
            mixed = (q @ k.transpose(-1, -2) / 2).softmax(-1) @ v
        return self.head(x + self.out(mixed.transpose(1, 2).flatten(2)))


@pytest.mark.parametrize("layout", ["three", "chunk", "head"])
@pytest.mark.parametrize("mix", ["sdpa", "einsum", "matmul"])
def test_fused_attention(layout: str, mix: str) -> None:
    found = symmetry(Attention(layout, mix), torch.randn(2, 6, 5))
    assert sorted(freedom(found).values()) == [(3,), (3, 4), (3, 4), (12,)]
    if mix == "sdpa":
        assert set(found.atoms) == {"embed", "qkv:head", "qkv:d_qk", "qkv:d_v"}
    assert {tensor for tensor, _ in found.occurrences["embed"]} >= {"qkv.weight", "out.weight", "head.weight"}
    segments = found.axes["qkv.weight"][0]
    assert len(segments) == 3
    assert segments[0].contiguous == (layout != "head")
    assert [f.atom for f in segments[0].factors] == [f.atom for f in segments[1].factors]


def test_multihead_attention_module() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
    net = nn.Sequential(nn.Linear(5, 8), layer, nn.Linear(8, 3))
    found = symmetry(net, torch.randn(2, 7, 5))
    assert freedom(found) == {
        "0": (8,),
        "1.self_attn:head": (2,),
        "1.self_attn:d_qk": (2, 4),
        "1.self_attn:d_v": (2, 4),
        "1.linear1": (12,),
    }


def test_multihead_attention_with_other_widths_and_weights_returned() -> None:
    class Cross(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.kv = nn.Linear(5, 8), nn.Linear(5, 6)
            self.attention = nn.MultiheadAttention(8, 2, kdim=6, vdim=6)
            self.head = nn.Linear(8, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            kv = self.kv(x)
            mixed, weights = self.attention(self.q(x), kv, kv)
            return self.head(mixed), weights

    found = freedom(symmetry(Cross(), torch.randn(4, 3, 5)))
    assert found.pop("q") == (8,)
    assert found.pop("kv") == (6,)
    assert sorted(found.values()) == [(2,), (2, 4), (2, 4), (8,)]


class Grouped(nn.Module):
    """Four query heads over two kv heads, shared in one of three ways; optional rotary positions."""

    def __init__(self, way: str, rotary: bool = False) -> None:
        super().__init__()
        self.way, self.rotary = way, rotary
        self.embed = nn.Linear(5, 8)
        self.q, self.k, self.v = nn.Linear(8, 24), nn.Linear(8, 12), nn.Linear(8, 12)
        self.o, self.head = nn.Linear(24, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        q, k, v = (p(x).unflatten(-1, (-1, 6)).transpose(1, 2) for p in (self.q, self.k, self.v))
        if self.rotary:
            angle = torch.arange(x.shape[1])[:, None] * torch.tensor([1.0, 0.1, 0.01]).repeat(2)
            q, k = (z * angle.cos() + torch.cat([-z[..., 3:], z[..., :3]], -1) * angle.sin() for z in (q, k))
        if self.way == "native":
            mixed = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        else:
            if self.way == "interleave":
                k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
            else:
                k, v = (z[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1, 2) for z in (k, v))
            mixed = F.scaled_dot_product_attention(q, k, v)
        return self.head(x + self.o(mixed.transpose(1, 2).flatten(2)))


@pytest.mark.parametrize("way", ["native", "interleave", "expand"])
def test_grouped_queries(way: str) -> None:
    assert freedom(symmetry(Grouped(way), torch.randn(2, 5, 5))) == {
        "embed": (8,),
        "q:head": (2,),
        "q:query": (2, 2),
        "q:d_qk": (2, 6),
        "v:d_v": (2, 6),
    }


def test_rotary_positions_pin_d_qk() -> None:
    found = freedom(symmetry(Grouped("native", rotary=True), torch.randn(2, 5, 5)))
    assert found == {"embed": (8,), "q:head": (2,), "q:query": (2, 2), "v:d_v": (2, 6)}


@pytest.mark.parametrize(
    "mixer",
    [
        lambda x: x.softmax(-2),  # over heads, unit by unit
        lambda x: (x @ x.transpose(-1, -2)).softmax(-1) @ x,  # every head meets every other in each unit
        lambda x: x - x.mean(-2, keepdim=True),
        lambda x: torch.einsum("...hd,...gd->...hg", x, x) @ x,
    ],
)
def test_mixing_heads_forbids_an_order_for_each_head(mixer: Callable[[Tensor], Tensor]) -> None:
    def forward(m: nn.ModuleDict, x: Tensor) -> Tensor:
        return m["b"](mixer(m["a"](x).unflatten(-1, (3, 4))).flatten(-2))

    net = Net(forward, a=nn.Linear(5, 12), b=nn.Linear(12, 2))
    assert freedom(symmetry(net, torch.randn(2, 5))) == {"m.a:outer": (3,), "m.a:outer#2": (4,)}


def test_normalising_inside_heads_allows_an_order_for_each_head() -> None:
    def forward(m: nn.ModuleDict, x: Tensor) -> Tensor:
        return m["b"](m["a"](x).unflatten(-1, (3, 4)).softmax(-1).flatten(-2))

    net = Net(forward, a=nn.Linear(5, 12), b=nn.Linear(12, 2))
    assert freedom(symmetry(net, torch.randn(2, 5))) == {"m.a:outer": (3,), "m.a:inner": (3, 4)}


def test_heads_told_apart_by_position_keep_an_order_for_each_head() -> None:
    """ALiBi: each head has a slope of its own, so heads stay, and the units of each head move on their own."""

    class Told(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(5, 12), nn.Linear(12, 2)

        def forward(self, x: Tensor) -> Tensor:
            slopes = torch.tensor([1.0, 0.5, 0.25])
            return self.b((F.relu(self.a(x)).unflatten(-1, (3, 4)) * slopes[:, None]).flatten(-2))

    found = symmetry(Told(), torch.randn(2, 5))
    assert freedom(found) == {"a:outer": (4,), "a:outer#2": (4,), "a:outer#3": (4,)}
    assert [s.offset for s in found.axes["a.weight"][0]] == [0, 4, 8]
    found = symmetry(Attention("three", slopes=True), torch.randn(2, 6, 5))
    assert sorted(freedom(found).values()) == [(4,)] * 6 + [(12,)]


def test_rms_norm_written_out() -> None:
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(6))

        def forward(self, x: Tensor) -> Tensor:
            wide = x.to(torch.float32)
            return self.gain * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    net = nn.Sequential(nn.Linear(4, 6), Norm(), nn.RMSNorm(6), nn.LayerNorm(6), nn.Linear(6, 2))
    assert freedom(symmetry(net, torch.randn(3, 4))) == {"0": (6,)}


def test_shortcut_by_padding_channels() -> None:
    """The parameter-free shortcut of CIFAR ResNets: subsample, pad channels with zeros."""

    def forward(m: nn.ModuleDict, x: Tensor) -> Tensor:
        x = F.relu(m["stem"](x))
        return m["head"]((F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 1, 1)) + m["down"](x)).mean((2, 3)))

    net = Net(forward, stem=nn.Conv2d(3, 4, 1), down=nn.Conv2d(4, 6, 1, stride=2), head=nn.Linear(6, 2))
    found = symmetry(net, torch.randn(2, 3, 6, 6))
    assert freedom(found) == {"m.stem": (4,)}
    assert [s.offset for s in found.axes["m.down.weight"][0]] == [0, 1, 5]


def test_channel_shuffle_and_pixel_shuffle_follow_the_units() -> None:
    shuffled = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ChannelShuffle(2), nn.ReLU(), nn.Conv2d(8, 2, 1))
    found = symmetry(shuffled, torch.randn(2, 3, 4, 4))
    assert freedom(found) == {"0:outer": (2,), "0:inner": (2, 4)}
    (segment,) = found.axes["3.weight"][1]
    assert [f.atom for f in segment.factors] == ["0:inner", "0:outer"]
    pixels = nn.Sequential(nn.Conv2d(3, 12, 1), nn.PixelShuffle(2), nn.ReLU(), nn.Conv2d(3, 2, 1))
    assert freedom(symmetry(pixels, torch.randn(2, 3, 4, 4))) == {"0": (3,)}


def test_learned_tokens_may_change_places() -> None:
    class Latents(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.latents = nn.Parameter(torch.randn(7, 4))
            self.k, self.head = nn.Linear(5, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            k = self.k(x)
            return self.head(((self.latents @ k.transpose(1, 2)).softmax(-1) @ k).amax(1))

    assert freedom(symmetry(Latents(), torch.randn(2, 6, 5))) == {"latents:outer": (7,), "latents:outer#2": (4,)}


def test_lookups_in_a_table_keep_the_other_axes() -> None:
    """Swin's relative position bias: a table of positions × heads, indexed by a constant."""

    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(5, 3))
            self.register_buffer("place", torch.arange(9).reshape(3, 3) % 5, persistent=False)
            self.a, self.b = nn.Linear(2, 3), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(F.relu(self.a(x)) * self.table[self.place.view(-1)].view(3, 3, 3).sum((0, 1)))

    assert freedom(symmetry(Biased(), torch.randn(4, 2))) == {"table": (3,)}


def test_unused_weights_are_pinned() -> None:
    net = Net(lambda m, x: m["b"](F.relu(m["a"](x))), a=nn.Linear(3, 4), b=nn.Linear(4, 2), idle=nn.Linear(5, 6))
    assert freedom(symmetry(net, torch.randn(2, 3))) == {"m.a": (4,)}


def test_an_unknown_operation_pins_what_it_touches_and_nothing_else() -> None:
    class Spectrum(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.fft.rfft(x).abs()

    net = nn.Sequential(
        nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 8), Spectrum(), nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 2)
    )
    assert freedom(symmetry(net, torch.randn(2, 3))) == {"0": (6,), "4": (7,)}


def test_recurrent_layers_are_pinned_whole() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.rnn, self.b = nn.Linear(3, 4), nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.rnn(self.a(x))[0])

    assert freedom(symmetry(Recurrent(), torch.randn(2, 6, 3))) == {}


def test_inputs_by_keyword_and_position() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor, *, scale: Tensor) -> dict[str, Tensor]:
            return {"out": self.b(F.relu(self.a(x) * scale))}

    x, scale = torch.randn(2, 3), torch.tensor(2.0)
    expected = symmetry(Two(), {"x": x, "scale": scale})
    assert expected == symmetry(Two(), (x,), kwargs={"scale": scale})
    assert freedom(expected) == {"a": (4,)}


def test_untraceable_module_says_which_line() -> None:
    class Branching(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.sum() > 0:  # the line in question
                return x
            return -x

    with pytest.raises(InputError, match=re.escape(f"{__file__}:") + r"\d+ \(if x\.sum\(\) > 0:"):
        symmetry(Branching(), torch.randn(3))


def test_meta_weights_can_be_derived_but_not_tested() -> None:
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        x = torch.empty(2, 3)
    assert freedom(symmetry(net, x, self_test=False)) == {"0": (4,)}
    with pytest.raises(InputError, match="meta device"):
        symmetry(net, x)
