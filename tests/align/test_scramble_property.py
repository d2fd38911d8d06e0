"""Random architectures keep their function when scrambled."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from merganser.align import scramble, symmetry
from merganser.align.double_precision import random_weights

WIDTHS = st.sampled_from([4, 6, 8, 12])


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Dense(nn.Module):
    """Input and output side by side on the channel axis."""

    def __init__(self, inner: nn.Module, dim: int) -> None:
        super().__init__()
        self.inner, self.dim = inner, dim

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, torch.tanh(self.inner(x))], self.dim)


class Gate(nn.Module):
    def __init__(self, width: int, dim: int) -> None:
        super().__init__()
        self.gain, self.dim = nn.Parameter(torch.randn(width)), dim

    def forward(self, x: Tensor) -> Tensor:
        gain = self.gain.view([-1] + [1] * (x.ndim - 1 - self.dim))
        a, b = (x * gain).chunk(2, self.dim)
        return torch.cat([a * torch.sigmoid(b), a], self.dim)


class Heads(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.qkv, self.out, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).movedim(2, 0).transpose(2, 3)
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).flatten(2))


@st.composite
def convolutional(draw: st.DrawFn) -> tuple[nn.Module, tuple[int, ...]]:
    width = draw(WIDTHS)
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1)]
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(
            st.sampled_from(["conv", "norm", "group", "depthwise", "grouped", "residual", "dense", "gate", "pool"])
        )
        if kind == "conv":
            layers.append(nn.Conv2d(width, width := draw(WIDTHS), 1))
        elif kind == "norm":
            layers += [nn.BatchNorm2d(width), nn.ReLU()]
        elif kind == "group":
            layers += [nn.GroupNorm(2, width), nn.GELU()]
        elif kind == "depthwise":
            layers.append(nn.Conv2d(width, width, 3, padding=1, groups=width))
        elif kind == "grouped":
            layers.append(nn.Conv2d(width, width, 1, groups=2))
        elif kind == "residual":
            layers.append(Residual(nn.Sequential(nn.Conv2d(width, 5, 1), nn.ReLU(), nn.Conv2d(5, width, 1))))
        elif kind == "dense":
            layers.append(Dense(nn.Conv2d(width, 4, 1), 1))
            width += 4
        elif kind == "gate":
            layers.append(Gate(width, 1))
        else:
            layers.append(nn.AvgPool2d(2, 1, 1))
    flat = draw(st.booleans())
    layers += [nn.AdaptiveAvgPool2d(2 if flat else 1), nn.Flatten(), nn.Linear(width * (4 if flat else 1), 3)]
    return nn.Sequential(*layers), (2, 3, 6, 6)


@st.composite
def sequential(draw: st.DrawFn) -> tuple[nn.Module, tuple[int, ...]]:
    width = draw(WIDTHS)
    layers: list[nn.Module] = [nn.Linear(5, width)]
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(["linear", "norm", "attention", "mlp", "dense", "gate", "lrn"]))
        if kind == "linear":
            layers += [nn.Linear(width, width := draw(WIDTHS)), nn.Tanh()]
        elif kind == "norm":
            layers.append(draw(st.sampled_from([nn.LayerNorm, nn.RMSNorm]))(width))
        elif kind == "attention":
            attention = Heads(width, draw(st.sampled_from([1, 2])))
            layers.append(Residual(attention) if draw(st.booleans()) else attention)
        elif kind == "mlp":
            layers.append(Residual(nn.Sequential(nn.Linear(width, 7), nn.GELU(), nn.Linear(7, width))))
        elif kind == "dense":
            layers.append(Dense(nn.Linear(width, 2), -1))
            width += 2
        elif kind == "gate":
            layers.append(Gate(width, 2))
        else:
            layers.append(nn.Softmax(-1))
    return nn.Sequential(*layers, nn.Linear(width, 3)), (2, 4, 5)


@settings(max_examples=30)
@given(st.one_of(convolutional(), sequential()), st.integers(0, 1000))
def test_scrambled_networks_compute_the_same(case: tuple[nn.Module, tuple[int, ...]], seed: int) -> None:
    net, shape = case
    net = net.double().eval()
    x = torch.randn(shape, dtype=torch.float64)
    found = symmetry(net, x, self_test=False)
    net.load_state_dict(random_weights(net, found, seed)[0])
    other = scramble(net, found, seed)
    with torch.no_grad():
        assert torch.allclose(net(x), other(x), rtol=1e-9, atol=1e-11)
    for name in found.objective:
        # Something moved, unless chance (or a tiny axis) left everything in place.
        atoms = [found.atoms[atom] for atom in found.free(name)]
        if max(atom.size for atom in atoms) >= 6:
            assert not torch.equal(net.state_dict()[name], other.state_dict()[name])


def test_scramble_leaves_the_original_alone() -> None:
    net = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 2))
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    found = symmetry(net, torch.randn(2, 3))
    one, same, two = (scramble(net, found, seed) for seed in (1, 1, 2))
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())
    assert torch.equal(one[0].weight, same[0].weight)
    assert not torch.equal(one[0].weight, two[0].weight)
