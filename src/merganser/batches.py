"""What a batch is, read in one way by everything that runs a module."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor, nn

from merganser.errors import InputError

Inputs: TypeAlias = Tensor | Sequence[Any] | Mapping[str, Any]
"""What a module is called with: `module(x)` of a tensor, `module(*xs)` of a tuple or list, `module(**xs)` of a mapping.
It holds no targets: of the (x, y) that a data loader gives, x is the batch."""
Batch: TypeAlias = tuple[Inputs, Tensor]
"""Inputs and targets, where both are asked for."""
Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""


def arguments(inputs: Inputs) -> Arguments:
    """The arguments that a batch stands for."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, Tensor):
        return (inputs,), {}
    if isinstance(inputs, (tuple, list)):
        return tuple(inputs), {}
    raise InputError(
        "inputs are a tensor, a tuple of positional arguments or a mapping of keyword arguments, "
        f"got {type(inputs).__name__}"
    )


def fitting(module: nn.Module, inputs: Inputs) -> Arguments:
    """The arguments that a batch stands for, if the module takes them."""
    args, kwargs = arguments(inputs)
    check_arguments(module, args, kwargs)
    return args, kwargs


def check_arguments(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse arguments that the module's forward pass does not have."""
    signature = inspect.signature(module.forward)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise InputError(
            f"{type(module).__name__} takes {signature} and cannot take these inputs ({error}): a tuple is its "
            "positional arguments, a mapping its keyword arguments; targets have no place among them"
        ) from None


def forward(module: nn.Module, inputs: Inputs) -> Any:
    """The module's output."""
    args, kwargs = fitting(module, inputs)
    return module(*args, **kwargs)


def first_tensor(inputs: Inputs) -> Tensor:
    """The first tensor among the inputs; its leading axis is the batch."""
    args, kwargs = arguments(inputs)
    for candidate in (*args, *kwargs.values()):
        if isinstance(candidate, Tensor):
            return candidate
    raise InputError("a batch holds no tensor: expected a tensor, a tuple or a mapping with one")
