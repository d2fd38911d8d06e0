"""Capture the pooled inputs of linear modules and convolutions, in a pass that stops at the last of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from merganser.errors import InputError, did_you_mean
from merganser.modules.convolutions import (
    CONVOLUTIONS,
    Convolution,
    axes_of,
    count_patches,
    is_plain,
    pool_patches,
)
from merganser.modules.inputs import Inputs
from merganser.modules.moments import evaluating

#: The mean over tokens (those that the attention mask keeps), the first token (CLS), or the last one.
Pooling = Literal["mean", "first", "last"]


class _Reached(Exception):
    """Ends a forward pass once every requested layer was called."""


@dataclass(frozen=True)
class Activations:
    """The pooled input of each layer, shape (samples, width), and the number of rows (tokens) over all samples."""

    inputs: Mapping[str, Tensor]
    rows: int


Layer: TypeAlias = nn.Linear | Convolution


def matrix_layers(module: nn.Module) -> dict[str, Layer]:
    """Return the linear modules and convolutions by name whose call is y = W x + b (x is a patch for convolutions), so
    that a hook sees x and may add to y.

    Not included: a subclass with its own forward pass, which may use W differently; the output projection of attention,
    whose weight is read without a call; a module with several names, to which an update would be applied once per name.
    """
    read = {part.out_proj for part in module.modules() if isinstance(part, nn.MultiheadAttention)}
    names = Counter(part for _, part in module.named_modules(remove_duplicate=False))
    return {
        name: part
        for name, part in module.named_modules()
        if isinstance(part, (nn.Linear, *CONVOLUTIONS))
        and (type(part).forward is nn.Linear.forward or is_plain(part))
        and "forward" not in vars(part)
        and part not in read
        and names[part] == 1
    }


def linear_layers(module: nn.Module) -> dict[str, nn.Linear]:
    """Return the linear modules among the `matrix_layers`."""
    return {name: part for name, part in matrix_layers(module).items() if isinstance(part, nn.Linear)}


def fused_layers(module: nn.Module) -> frozenset[str]:
    """Return modules inside a transformer block of PyTorch, whose fused kernel reads weights without calling any of
    them. Hooks disable the kernel, and with it the zeros at padded positions.
    """
    blocks = [(name, part) for name, part in module.named_modules() if isinstance(part, nn.TransformerEncoderLayer)]
    return frozenset(f"{name}.{inner}".strip(".") for name, part in blocks for inner, _ in part.named_modules())


@contextmanager
def unpacked(module: nn.Module) -> Iterator[None]:
    """Make PyTorch's transformer encoders keep padded batches as plain tensors: nested ones have no shape that a
    hook could read. (A block with hooks is not fused anyway.)
    """
    encoders = [part for part in module.modules() if isinstance(part, nn.TransformerEncoder)]
    before = [part.use_nested_tensor for part in encoders]
    try:
        for part in encoders:
            part.use_nested_tensor = False
        yield
    finally:
        for part, packs in zip(encoders, before, strict=True):
            part.use_nested_tensor = packs


def input_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """Return x of a call of a layer, `layer(x)` or `layer(input=x)`."""
    x: Tensor = args[0] if args else kwargs["input"]
    return x


#: Common names of output layers.
_HEADS = frozenset({"classifier", "embed_out", "head", "head_dist", "lm_head", "logits", "score"})


def output_layers(module: nn.Module) -> frozenset[str]:
    """Return layers whose output is the module's: those with names of heads, and the module defined last.

    Their inputs describe the task rather than the input, and a pass that ends there is a complete one.
    """
    leaves = [name for name, part in module.named_modules() if next(part.children(), None) is None]
    return frozenset(name for name in matrix_layers(module) if name.rpartition(".")[2] in _HEADS or name == leaves[-1])


def layer_of(name: str, known: Mapping[str, Layer]) -> str:
    """Return the name of a known layer, given itself or the name of its weight."""
    layer = name.removesuffix(".weight")
    if layer not in known:
        raise InputError(f"{name!r} is not a layer that the module calls as y = W x + b{did_you_mean(layer, known)}")
    return layer


def input_width(layer: Layer) -> int:
    """Return the number of inputs of W: the width of a row, or of a patch."""
    return layer.weight[0].numel()


@torch.no_grad()
def capture(module: nn.Module, inputs: Inputs, layers: Sequence[str], pooling: Pooling = "mean") -> Activations:
    """Run `module` in evaluation mode and keep the pooled inputs of `layers` at their first call; the pass ends after
    the last.
    """
    seen: dict[str, Tensor] = {}
    rows = 0
    size = inputs.size

    def watch(layer: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            nonlocal rows
            if layer in seen:
                return
            x = input_of(args, kwargs)
            _check_axes(layer, known[layer], x)
            if x.shape[0] != size:
                raise InputError(
                    f"{layer!r} sees {x.shape[0]} samples, but the batch has {size}; routing needs samples along "
                    "the first axis"
                )
            seen[layer], count = _pool_input(known[layer], x, pooling, inputs.mask)
            rows = max(rows, count)
            if len(seen) == len(layers):
                raise _Reached

        return hook

    known = matrix_layers(module)
    for layer in layers:
        if layer not in known:
            layer_of(layer, known)  # raises an error that lists the layers
    with ExitStack() as set_hooks, suppress(_Reached), unpacked(module), evaluating(module):
        for layer in layers:
            set_hooks.callback(known[layer].register_forward_pre_hook(watch(layer), with_kwargs=True).remove)
        inputs.run(module)
    if missed := [layer for layer in layers if layer not in seen]:
        raise InputError(f"{missed[0]!r} is not called in the module's forward pass; name other layers to route at")
    return Activations({layer: seen[layer] for layer in layers}, rows)


def _check_axes(name: str, layer: Layer, x: Tensor) -> None:
    if isinstance(layer, nn.Linear):
        fits, wanted = x.dim() >= 2, "samples × width"
        width, expected = x.shape[-1], layer.in_features
    else:
        fits, wanted = x.dim() == axes_of(layer), f"samples × channels and {axes_of(layer) - 2} axes of positions"
        width, expected = x.shape[1], layer.in_channels
    if not fits:
        raise InputError(
            f"{name!r} sees a tensor of shape {list(x.shape)}, not {wanted}: a batch of one sample is x[None]"
        )
    if width != expected:
        raise InputError(
            f"{name!r} takes inputs of width {expected}; it does not accept a tensor of shape {list(x.shape)}"
        )


def _pool_input(layer: Layer, x: Tensor, pooling: Pooling, mask: Tensor | None) -> tuple[Tensor, int]:
    """Return the pooled input (samples × width), and the number of rows or patches of all samples."""
    if isinstance(layer, nn.Linear):
        return pool(x, pooling, mask).float(), x.shape[:-1].numel()
    return pool_patches(layer, x, pooling).float(), len(x) * count_patches(layer, x)


def pool(x: Tensor, pooling: Pooling, mask: Tensor | None = None) -> Tensor:
    """Pool samples × … × width to samples × width; a mask counts only if it fits the tokens."""
    if x.dim() == 2:
        return x
    if mask is not None and (x.dim() != 3 or mask.shape != x.shape[:2]):
        mask = None
    if pooling == "first":
        return x.flatten(1, -2)[:, 0]
    if pooling == "last":
        if mask is None:
            return x.flatten(1, -2)[:, -1]
        last = mask.shape[1] - 1 - mask.flip(1).long().argmax(1)
        return x[torch.arange(x.shape[0], device=x.device), last]
    if mask is None:
        return x.flatten(1, -2).mean(1)
    kept = mask[..., None].to(x.dtype)
    return (x * kept).sum(1) / kept.sum(1).clamp(min=1)
