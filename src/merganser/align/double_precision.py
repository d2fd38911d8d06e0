"""Run modules in double precision on weights drawn for a test, with only one float64 copy of the weights."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from merganser.align.buffers import moving_buffers
from merganser.align.execution import PROCESS_SETTINGS, private_copy, use_experts
from merganser.align.symmetries import Symmetry
from merganser.errors import InputError
from merganser.modules.batches import Arguments

_WIDE = {
    torch.float32: torch.float64,
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.complex64: torch.complex128,
    torch.complex32: torch.complex128,
}


class _Double(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Turns casts to a narrower type into casts to float64: some models compute parts in float32."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        def widen(dtype: torch.dtype) -> torch.dtype:
            return _WIDE.get(dtype, dtype)

        return func(*tree_map_only(torch.dtype, widen, args), **tree_map_only(torch.dtype, widen, kwargs or {}))


@contextmanager
def _double_by_default() -> Iterator[None]:
    """Make constants that a forward pass creates float64: the least float64 number of a mask is no float32.

    torch has one default dtype for all threads, so only one thread at a time runs in here.
    """
    with PROCESS_SETTINGS:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


def widen(tensor: Tensor) -> Tensor:
    """Return the tensor in float64 or complex128; integers are unchanged."""
    return tensor.to(_WIDE.get(tensor.dtype, tensor.dtype))


def random_weights(module: nn.Module, symmetry: Symmetry, seed: int = 0) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return (state dict, remaining buffers) in float64, perturbed on their own scale; constant buffers are unchanged.

    Tied tensors are one tensor, if the symmetry moves them in the same way.
    """
    generator = torch.Generator().manual_seed(seed)
    buffers = dict(module.named_buffers(remove_duplicate=False))
    moving = moving_buffers(module) | {name for name in buffers if name in symmetry.axes and symmetry.free(name)}
    drawn: dict[Any, Tensor] = {}
    state: dict[str, Tensor] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor):
            continue
        key = (tensor.data_ptr() or name, tensor.shape, symmetry.axes.get(name))
        if key not in drawn:
            constant = name in buffers and name not in moving
            drawn[key] = (
                widen(tensor.detach()).clone() if constant else _draw_weight(name, tensor.detach(), buffers, generator)
            )
        state[name] = drawn[key]
    rest = {name: widen(tensor) for name, tensor in buffers.items() if name not in state}
    return state, rest


def _draw_weight(name: str, tensor: Tensor, buffers: Container[str], generator: torch.Generator) -> Tensor:
    if tensor.is_complex():
        return torch.view_as_complex(_draw_weight(name, torch.view_as_real(tensor.resolve_conj()), buffers, generator))
    if not tensor.is_floating_point():
        return tensor.clone()
    noise = torch.rand(tensor.shape, generator=generator, dtype=torch.float64).to(tensor.device).sub_(0.5)
    if name in buffers and not name.endswith("running_mean"):
        return noise.add_(1).mul_(tensor)  # stays positive; a mask of −∞ and 0 stays one
    scale = float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) / max(tensor.numel(), 1) ** 0.5
    return noise.mul_(max(scale, 0.05)).add_(tensor)


def call_in_double(module: nn.Module, weights: Mapping[str, Tensor], example: Arguments) -> Any:
    """Run a fresh copy of the module in float64 with these weights, and the same random numbers every time.

    Raises:
        InputError: If the module does not run in float64.
    """
    args, kwargs = tree_map_only(torch.Tensor, widen, example)
    copy = private_copy(module)
    use_experts(copy, "eager")  # grouped matrix products have no float64
    try:
        with _double_by_default(), torch.random.fork_rng(devices=[]), _Double():  # type: ignore[no-untyped-call]
            torch.manual_seed(0)
            return functional_call(copy, dict(weights), args, kwargs, tie_weights=False)
    except (RuntimeError, TypeError, ValueError) as error:
        raise InputError(
            f"{type(module).__name__} cannot be self-tested, it does not run in float64: {error}; "
            "derive with self_test=False if you trust the derivation"
        ) from error
