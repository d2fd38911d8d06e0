"""Run a module for derivation and self-test: on private copies that share its weights, with example arguments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from inspect import signature
from threading import RLock
from typing import Any

import torch
from torch import nn

from merganser.errors import InputError
from merganser.modules.batches import Arguments, InputsLike, arguments

#: Held by whoever changes a setting that torch keeps for the whole process, so that threads restore what they found.
PROCESS_SETTINGS = RLock()


def private_copy(module: nn.Module) -> nn.Module:
    """Return a copy in evaluation mode that shares parameters and buffers with `module`, and nothing else.

    Some modules keep tensors that their forward pass computed from the weights (position biases in LeViT and TinyViT).
    They drop them when training starts, so the copy is switched to training mode and back.

    Raises:
        InputError: If the module cannot be copied.
    """
    memo: dict[int, Any] = {id(t): t for t in (*module.parameters(), *module.buffers())}
    for owner in module.modules():
        for tensor in _find_kept_tensors(owner):
            if id(tensor) not in memo and not tensor.is_leaf:  # deepcopy refuses the results of differentiable code
                memo[id(tensor)] = tensor.detach().clone()
    try:
        copy = deepcopy(module, memo)
    except Exception as error:
        raise InputError(
            f"{type(module).__name__} cannot be copied ({error}); symmetries are derived and tested on a copy, so that "
            "the module is not changed: remove what cannot be copied from it"
        ) from error
    for owner in copy.modules():
        if any(True for _ in _find_kept_tensors(owner)):
            owner.train()
    _switch_off_caches(copy)
    return copy.eval()


def _switch_off_caches(copy: nn.Module) -> None:
    """Make models of transformers run without their key-value cache, which they return by default."""
    for config in _find_configs(copy):
        if getattr(config, "use_cache", None) is True:
            config.use_cache = False


def use_experts(copy: nn.Module, implementation: str) -> None:
    """Choose how the experts of transformers are computed: "eager", "batched_mm" or "grouped_mm"."""
    for config in _find_configs(copy):
        if getattr(config, "_experts_implementation", None) is not None:
            config._experts_implementation = implementation


def _find_configs(copy: nn.Module) -> Iterator[Any]:
    """Yield the settings in the parts of a copied model."""
    return (vars(owner)["config"] for owner in copy.modules() if "config" in vars(owner))


@contextmanager
def plain_kernels() -> Iterator[None]:
    """Disable fused attention kernels inside this context: they hide their computation from a trace.

    This holds for the whole process; one thread at a time can be in here or run in double precision.
    """
    with PROCESS_SETTINGS:
        fused = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fused)


def _find_kept_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the tensors among the attributes of a module that are neither parameters nor buffers."""
    for name, value in vars(module).items():
        if name not in ("_parameters", "_buffers", "_modules"):
            yield from _walk_tensors(value)


def _walk_tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _walk_tensors(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _walk_tensors(inner)


def example_arguments(module: nn.Module, inputs: InputsLike, kwargs: Mapping[str, Any] | None = None) -> Arguments:
    """Return positional and keyword arguments; models of transformers run without their cache unless requested."""
    args, own = arguments(inputs)
    named = {**own, **(kwargs or {})}
    if "use_cache" in signature(module.forward).parameters:
        named.setdefault("use_cache", False)
    return args, named
