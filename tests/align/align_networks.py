"""Small networks with symmetries written by hand, and noisy scrambled copies of them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from merganser.align.permutations import apply, random
from merganser.align.symmetries import Atom, AxisSegments, Factor, Symmetry, concatenation, product


def pinned(size: int) -> AxisSegments:
    return product(Factor(None, size))


def moved(*pairs: tuple[str | None, int]) -> AxisSegments:
    return product(*(Factor(name, size) for name, size in pairs))


def symmetry(module: nn.Module, atoms: list[Atom], axes: dict[str, tuple[AxisSegments, ...]]) -> Symmetry:
    """Axes not given are pinned; running statistics are buffers."""
    state = module.state_dict()
    every = {name: axes.get(name, tuple(pinned(size) for size in tensor.shape)) for name, tensor in state.items()}
    buffers = frozenset(name for name, _ in module.named_buffers())
    return Symmetry({atom.name: atom for atom in atoms}, every, buffers)


def mlp(*sizes: int) -> tuple[nn.Sequential, Symmetry]:
    layers: list[nn.Module] = []
    axes: dict[str, tuple[AxisSegments, ...]] = {}
    names = [None, *(f"h{i}" for i in range(1, len(sizes) - 1)), None]
    for i in range(len(sizes) - 1):
        position = len(layers)
        layers += [nn.Linear(sizes[i], sizes[i + 1]), nn.ReLU()]
        out, into = moved((names[i + 1], sizes[i + 1])), moved((names[i], sizes[i]))
        axes |= {f"{position}.weight": (out, into), f"{position}.bias": (out,)}
    module = nn.Sequential(*layers[:-1])
    return module, symmetry(module, [Atom(f"h{i}", sizes[i]) for i in range(1, len(sizes) - 1)], axes)


class ChannelNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.movedim(1, -1)).movedim(-1, 1)


class ResNet(nn.Module):
    """A stem, two residual blocks, a strided one with a shortcut, global pooling."""

    def __init__(self, width: int, norm: str) -> None:
        super().__init__()
        make = nn.BatchNorm2d if norm == "batch" else ChannelNorm
        self.stem = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.n0 = make(width)
        self.a1, self.m1 = nn.Conv2d(width, width, 3, padding=1, bias=False), make(width)
        self.b1, self.n1 = nn.Conv2d(width, width, 3, padding=1, bias=False), make(width)
        self.a2, self.m2 = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1, bias=False), make(2 * width)
        self.b2, self.n2 = nn.Conv2d(2 * width, 2 * width, 3, padding=1, bias=False), make(2 * width)
        self.short = nn.Conv2d(width, 2 * width, 1, stride=2)
        self.head = nn.Linear(2 * width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.n0(self.stem(x)))
        x = F.relu(x + self.n1(self.b1(F.relu(self.m1(self.a1(x))))))
        x = F.relu(self.short(x) + self.n2(self.b2(F.relu(self.m2(self.a2(x))))))
        return self.head(x.mean((2, 3)))


def resnet(width: int, norm: str) -> tuple[ResNet, Symmetry]:
    module = ResNet(width, norm)
    x, y = moved(("x", width)), moved(("y", 2 * width))
    i, j = moved(("i", width)), moved(("j", 2 * width))
    k = pinned(3)
    axes = {
        "stem.weight": (x, pinned(3), k, k),
        "a1.weight": (i, x, k, k),
        "b1.weight": (x, i, k, k),
        "a2.weight": (j, x, k, k),
        "b2.weight": (y, j, k, k),
        "short.weight": (y, x, pinned(1), pinned(1)),
        "short.bias": (y,),
        "head.weight": (pinned(5), y),
    }
    for prefix, axis in {"n0": x, "m1": i, "n1": x, "m2": j, "n2": y}.items():
        for name, tensor in module.state_dict().items():
            if name.startswith(prefix) and tensor.dim() == 1:
                axes[name] = (axis,)
    atoms = [Atom("x", width), Atom("y", 2 * width), Atom("i", width), Atom("j", 2 * width)]
    return module, symmetry(module, atoms, axes)


def vgg(width: int) -> tuple[nn.Sequential, Symmetry]:
    """Convolutions, a pooling and a flatten before the classifier."""
    module = nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, width, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(width * 16, 2 * width),
        nn.ReLU(),
        nn.Linear(2 * width, 5),
    )
    a, b, c, k = moved(("a", width)), moved(("b", width)), moved(("c", 2 * width)), pinned(3)
    axes = {
        "0.weight": (a, pinned(3), k, k),
        "0.bias": (a,),
        "3.weight": (b, a, k, k),
        "3.bias": (b,),
        "6.weight": (c, moved(("b", width), (None, 16))),
        "6.bias": (c,),
        "8.weight": (pinned(5), c),
    }
    return module, symmetry(module, [Atom("a", width), Atom("b", width), Atom("c", 2 * width)], axes)


class Attention(nn.Module):
    """One pre-norm block: fused QKV, heads, an MLP; read in and out by linear layers."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.embed = nn.Linear(6, width)
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        x = x + self.down(F.relu(self.up(x)))
        return self.head(x.mean(1))


def attention(width: int, heads: int) -> tuple[Attention, Symmetry]:
    module = Attention(width, heads)
    d = width // heads
    s, u = moved(("stream", width)), moved(("hidden", 2 * width))
    qk, vo = moved(("head", heads), ("qk", d)), moved(("head", heads), ("vo", d))
    fused = concatenation(qk, qk, vo)
    axes = {
        "embed.weight": (s, pinned(6)),
        "embed.bias": (s,),
        "norm.weight": (s,),
        "norm.bias": (s,),
        "qkv.weight": (fused, s),
        "qkv.bias": (fused,),
        "out.weight": (s, vo),
        "out.bias": (s,),
        "up.weight": (u, s),
        "up.bias": (u,),
        "down.weight": (s, u),
        "down.bias": (s,),
        "head.weight": (pinned(5), s),
    }
    atoms = [
        Atom("stream", width),
        Atom("hidden", 2 * width),
        Atom("head", heads),
        Atom("qk", d, parent="head"),
        Atom("vo", d, parent="head"),
    ]
    return module, symmetry(module, atoms, axes)


def trained_like(module: nn.Module, seed: int) -> dict[str, Tensor]:
    """A state of the module with nothing at its initial value: norms, biases and statistics are random too."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, tensor in module.state_dict().items():
        if not tensor.is_floating_point():
            state[name] = tensor.clone()
            continue
        fan_in = tensor[0].numel() if tensor.dim() > 1 else 1
        noise = torch.randn(tensor.shape, generator=generator)
        state[name] = noise / fan_in**0.5 if tensor.dim() > 1 else 0.5 * noise
        if "norm" in name or (name.split(".")[0][0] in "nm" and name.endswith(("weight", "var"))):
            state[name] = 1.0 + 0.2 * noise.abs() if not name.endswith("bias") else 0.2 * noise
    return state


def noisy_copies(state: dict[str, Tensor], symmetry: Symmetry, count: int, noise: float, seed: int):
    """Scrambled copies with relative Gaussian noise on every tensor that is matched, and the permutations used."""
    generator = torch.Generator().manual_seed(seed)
    copies, planted = [], []
    for copy in range(count):
        perturbed = {}
        for name, tensor in state.items():
            spread = noise * tensor.float().std() if name in symmetry.objective and tensor.numel() > 1 else 0.0
            perturbed[name] = (
                tensor + spread * torch.randn(tensor.shape, generator=generator) if spread else tensor.clone()
            )
        permutations = random(symmetry, seed=seed + copy)
        planted.append(permutations)
        copies.append(apply(symmetry, permutations, perturbed))
    return copies, planted
