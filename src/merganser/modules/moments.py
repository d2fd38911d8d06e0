"""Statistics of activations, streamed through forward hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from merganser.errors import InputError
from merganser.modules.batches import InputsLike, forward, require_several

Hook = Callable[[Tensor], Tensor | None]

CHANNELS_SECOND = (nn.modules.conv._ConvNd, nn.GroupNorm, nn.modules.batchnorm._BatchNorm)
CHANNELS_LAST = (nn.Linear, nn.LayerNorm)


@dataclass
class Moments:
    """Mean and variance of every channel, merged batch by batch in float64 (Chan, Golub and LeVeque)."""

    count: int = 0
    mean: Tensor | None = None
    squares: Tensor | None = None

    def add(self, rows: Tensor) -> None:
        """Add rows of samples with columns of channels."""
        rows = rows.double()
        count, mean = len(rows), rows.mean(dim=0)
        squares = (rows - mean).square().sum(dim=0)
        if self.mean is None or self.squares is None:
            self.count, self.mean, self.squares = count, mean, squares
            return
        total, shift = self.count + count, mean - self.mean
        self.squares = self.squares + squares + shift.square() * (self.count * count / total)
        self.mean = self.mean + shift * (count / total)
        self.count = total

    @property
    def values(self) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation."""
        if self.mean is None or self.squares is None:
            raise InputError("no batch was added")
        return self.mean, (self.squares / self.count).sqrt()


def is_turned(module: nn.Module) -> bool:
    """Return whether a linear layer stores its weight as inputs × outputs: a transposed convolution, or transformers'
    Conv1D.
    """
    return isinstance(module, nn.modules.conv._ConvTransposeNd) or type(module).__name__ == "Conv1D"


def output_axis(module: nn.Module) -> int | None:
    """Return the axis of a layer's weight that counts the channels of its output; None for a layer without one."""
    if isinstance(module, nn.modules.conv._ConvTransposeNd) and module.groups > 1:
        return None  # it counts those of one group
    if is_turned(module):
        return 1
    return 0 if isinstance(module, CHANNELS_SECOND + CHANNELS_LAST) else None


def channels_second(module: nn.Module, output: Tensor) -> bool:
    """Return whether the channels of a layer's output are its second axis, not the last.

    A LayerNorm with its own forward may normalise channels of images (timm's LayerNorm2d), visible in its shape.
    """
    if isinstance(module, nn.LayerNorm) and type(module).forward is not nn.LayerNorm.forward:
        return output.dim() == 4 and module.normalized_shape == (output.shape[1],)
    return isinstance(module, CHANNELS_SECOND)


def channel_rows(module: nn.Module, output: Tensor) -> Tensor:
    """Return the output of a layer as a matrix with one row per sample and position and one column per channel."""
    if channels_second(module, output):
        output = output.movedim(1, -1)
    width = 1
    if isinstance(module, nn.LayerNorm):
        width = len(module.normalized_shape)
    return output.reshape(-1, *output.shape[-width:]).flatten(1)


def check_finite(statistics: Tensor, layer: str) -> None:
    """Refuse statistics of activations that hold NaN or infinity."""
    if not torch.isfinite(statistics).all():
        raise InputError(f"the activations of {layer!r} are not finite: look for NaN or infinity in the batches")


@contextmanager
def hook_outputs(model: nn.Module, hooks: Mapping[str, Hook]) -> Iterator[None]:
    """Pass each named submodule's output to its hook; a hook that returns a tensor replaces the output."""

    def wrap(hook: Hook) -> Callable[[nn.Module, Any, Any], Any]:
        return lambda _module, _inputs, output: hook(output) if isinstance(output, Tensor) else None

    modules = dict(model.named_modules())
    with ExitStack() as set_hooks:
        for name, hook in hooks.items():
            set_hooks.callback(modules[name].register_forward_hook(wrap(hook)).remove)
        yield


@contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """Use evaluation mode inside the block; restores the mode of every submodule on exit."""
    modes = [(module, module.training) for model in models for module in model.modules()]
    try:
        for model in models:
            model.eval()
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def run(model: nn.Module, batches: Iterable[InputsLike], before: Callable[[InputsLike], None] | None = None) -> None:
    """Run forward passes for the effects of hooks; `before` is called with every batch."""
    require_several(batches, "batches")
    seen = False
    with torch.no_grad():
        for batch in batches:
            if before is not None:
                before(batch)
            forward(model, batch)
            seen = True
    if not seen:
        raise InputError("there are no batches (an iterator can be read only once); give a list or a data loader")
