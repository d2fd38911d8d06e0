"""The image classifiers of the zoo: plain modules that `torch.export` can trace.

Shapes follow the thesis (appendix, "Architectural details"): an MLP 784-256-512-512-256-classes and ResNet20 with
either normalisation and a width factor. Besides, a small CNN without normalisation, a VGG11 of half width with
BatchNorm and the patch transformer of `vit`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.zoo.vit import ViT
from merganser.errors import InputError, did_you_mean

Norm = Callable[[int], nn.Module]


class ChannelLayerNorm(nn.LayerNorm):
    """LayerNorm over the channels of each pixel, as Git Re-Basin normalises: permuting channels commutes with it."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def initialise(model: nn.Module) -> None:
    """Set weights to N(0, 2/fan-in) and biases to 0."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)


class MLP(nn.Module):
    """Input to 256, hidden layers of 512, 512 and 256, ReLU between, log-probabilities out."""

    def __init__(self, pixels: int = 784, classes: int = 10, hidden: tuple[int, ...] = (256, 512, 512, 256)) -> None:
        super().__init__()
        sizes = (pixels, *hidden)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(sizes, hidden, strict=False))
        self.head = nn.Linear(hidden[-1], classes)

    def forward(self, images: Tensor) -> Tensor:
        x = images.flatten(1)
        for layer in self.layers:
            x = F.relu(layer(x))
        return F.log_softmax(self.head(x), dim=-1)


class Block(nn.Module):
    """Two 3×3 convolutions and a shortcut, which is a normalised 1×1 convolution where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = norm(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = norm(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), norm(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet20(nn.Module):
    """Three groups of three residual blocks of 16w, 32w and 64w channels, mean over pixels, one linear layer."""

    def __init__(self, norm: Norm, width: int = 1, classes: int = 10) -> None:
        super().__init__()
        channels = 16 * width
        self.stem = nn.Conv2d(3, channels, 3, padding=1, bias=False)
        self.norm = norm(channels)
        blocks, inputs = [], channels
        for group in range(3):
            outputs = channels * 2**group
            for i in range(3):
                blocks.append(Block(inputs, outputs, stride=2 if group > 0 and i == 0 else 1, norm=norm))
                inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inputs, classes)
        initialise(self)

    def forward(self, images: Tensor) -> Tensor:
        x = self.blocks(F.relu(self.norm(self.stem(images))))
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


class CNN(nn.Module):
    """Three 3×3 convolutions of 32, 64 and 64 channels, pooled after each, then 128 hidden units: no normalisation."""

    def __init__(self, inputs: int = 1, classes: int = 10, channels: tuple[int, ...] = (32, 64, 64)) -> None:
        super().__init__()
        sizes = (inputs, *channels)
        self.convolutions = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in zip(sizes, channels, strict=False))
        self.hidden = nn.Linear(channels[-1], 128)
        self.head = nn.Linear(128, classes)
        initialise(self)

    def forward(self, images: Tensor) -> Tensor:
        x = images
        for convolution in self.convolutions:
            x = F.max_pool2d(F.relu(convolution(x)), 2)
        logits: Tensor = self.head(F.relu(self.hidden(x.mean((2, 3)))))
        return logits


class VGG11(nn.Module):
    """Eight 3×3 convolutions in five pooled groups, then a three-layer classifier; `width` scales all of them."""

    groups = ((64,), (128,), (256, 256), (512, 512), (512, 512))

    def __init__(self, norm: Norm, width: float = 1, classes: int = 10) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inputs = 3
        for group in self.groups:
            for outputs in (int(channels * width) for channels in group):
                layers += [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), norm(outputs), nn.ReLU()]
                inputs = outputs
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Linear(inputs, inputs),
            nn.ReLU(),
            nn.Linear(inputs, inputs),
            nn.ReLU(),
            nn.Linear(inputs, classes),
        )
        initialise(self)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(images).flatten(1))
        return logits


ARCHITECTURES: dict[str, Callable[[], nn.Module]] = {
    "mlp": MLP,
    "cnn": CNN,
    "resnet20-bn": partial(ResNet20, nn.BatchNorm2d),
    "resnet20-bn-2x": partial(ResNet20, nn.BatchNorm2d, width=2),
    "resnet20-ln": partial(ResNet20, ChannelLayerNorm),
    "resnet20-ln-2x": partial(ResNet20, ChannelLayerNorm, width=2),
    "vgg11-bn": partial(VGG11, nn.BatchNorm2d, width=0.5),
    "vit": ViT,
}


def build(name: str) -> nn.Module:
    """A freshly initialised architecture by name."""
    if name not in ARCHITECTURES:
        raise InputError(f"unknown architecture {name!r}{did_you_mean(name, ARCHITECTURES)}")
    return ARCHITECTURES[name]()
