"""The symmetries of attention: heads, the units inside them, and what forbids an order for each head."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from derivation_nets import Net, freedom
from torch import Tensor, nn

from merganser.align import symmetry


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


class ComplexRotary(Attention):
    """Rotary positions as products with complex numbers (DeepSeek-V2, Llama 4), and a mask of the least number."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        q, k, v = self.qkv(x).unflatten(-1, (3, 3, 4)).permute(2, 0, 3, 1, 4).unbind(0)
        angles = torch.outer(torch.arange(x.shape[1], dtype=torch.float32), torch.tensor([1.0, 0.1]))
        turns = torch.polar(torch.ones_like(angles), angles)
        q, k = (
            torch.view_as_real(torch.view_as_complex(part.unflatten(-1, (2, 2))) * turns).flatten(-2) for part in (q, k)
        )
        scores = torch.max(q @ k.transpose(-1, -2), torch.tensor(torch.finfo(q.dtype).min))
        return self.head(x + self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2)))


def test_complex_rotary_positions_leave_the_heads() -> None:
    found = symmetry(ComplexRotary(), torch.randn(2, 6, 5))
    assert sorted(freedom(found).values()) == [(3,), (3, 4), (12,)]
