"""The format of batches, read in one way by everything that runs a module."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from merganser.errors import InputError, first_line

InputsLike: TypeAlias = Tensor | Sequence[Any] | Mapping[str, Any]
"""The arguments of a module: `module(x)` for a tensor, `module(*xs)` for a tuple or list, `module(**xs)` for a mapping.
If no targets are needed, (inputs, targets) of a data loader are accepted too: see `drop_targets`."""
Batch: TypeAlias = tuple[InputsLike, Tensor]
"""Inputs and targets, where both are needed."""
Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""


def arguments(inputs: InputsLike) -> Arguments:
    """Return the arguments of inputs."""
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


def drop_targets(module: nn.Module, batch: Any) -> Any:
    """Return the inputs of a batch: the first part of (inputs, targets) from a data loader, else all of it.

    A pair is (inputs, targets) if its first part is itself a tuple, list or mapping of inputs; if the module cannot
    take two arguments; or if it need not and the second part is a class per sample (integers along one axis). Any other
    tuple or list contains the module's positional arguments.

    Args:
        module: The module that the batch is for.
        batch: A tensor, a tuple or list, or a mapping.

    Returns:
        Inputs for `arguments`.

    Example:
        >>> x, y = torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64)
        >>> drop_targets(nn.Linear(3, 2), (x, y)) is x
        True
    """
    if not isinstance(batch, (tuple, list)) or len(batch) != 2 or not isinstance(batch[1], Tensor):
        return batch
    inputs, targets = batch
    if isinstance(inputs, (tuple, list, Mapping)):
        return inputs
    if not isinstance(inputs, Tensor):
        return batch
    signature = inspect.signature(module.forward)
    if not _takes(signature, inputs, targets):
        return inputs if _takes(signature, inputs) else batch
    classes = targets.dim() == 1 and not (targets.is_floating_point() or targets.is_complex())
    like_classes = classes and targets.dtype != torch.bool and inputs.dim() > 1 and len(inputs) == len(targets)
    return inputs if like_classes and _takes(signature, inputs) else batch


def _takes(signature: inspect.Signature, *args: Any) -> bool:
    try:
        signature.bind(*args)
    except TypeError:
        return False
    return True


def require_targets(batch: Any, what: str = "data") -> Batch:
    """Return a batch as (inputs, targets), or refuse one without targets.

    Targets of narrow integers, which losses of torch do not take, become int64.

    Args:
        batch: A pair from a data loader.
        what: The name of the data in messages.
    """
    if isinstance(batch, (tuple, list)) and len(batch) == 2 and isinstance(batch[1], Tensor):
        inputs, targets = batch
        narrow = targets.dtype != torch.bool and not (targets.is_floating_point() or targets.is_complex())
        return inputs, targets.long() if narrow else targets
    raise InputError(f"{what}: expected labelled batches (inputs, targets), got {_describe(batch)}")


def require_several(batches: Any, what: str = "data") -> Iterable[Any]:
    """Return the batches, or refuse a single batch.

    Args:
        batches: A list, a data loader or an iterator.
        what: The name of the data in messages.
    """
    if isinstance(batches, (Tensor, Mapping, str)) or not isinstance(batches, Iterable):
        raise InputError(f"{what}: expected a list of batches or a data loader, got {_describe(batches)}")
    return batches


def reusable(batches: Any, what: str = "data") -> Iterable[Any]:
    """Return `several` batches that can be read repeatedly; an iterator is read at once."""
    found = require_several(batches, what)
    return list(found) if isinstance(found, Iterator) else found


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return f"a {type(value).__name__}" + (f" of {len(value)}" if isinstance(value, (tuple, list)) else "")


def fitting(module: nn.Module, batch: InputsLike | Batch) -> Arguments:
    """Return the arguments of a batch, if the module accepts them."""
    args, kwargs = arguments(drop_targets(module, batch))
    check_arguments(module, args, kwargs)
    return args, kwargs


def check_arguments(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse arguments that the module's forward pass does not accept."""
    signature = inspect.signature(module.forward)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise InputError(
            f"{type(module).__name__} takes {signature} and does not accept these inputs ({error}): a tuple has its "
            "positional arguments, a mapping its keyword arguments; leave out targets"
        ) from None


@contextmanager
def explain_input_errors(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Turn errors of a module for inputs of a wrong shape or type into an `InputError` that names them."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except TypeError:
        check_arguments(module, args, kwargs)
        raise
    except (RuntimeError, ValueError, IndexError) as error:
        given = [_describe(value) for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        raise InputError(
            f"{type(module).__name__} does not accept {' and '.join(given) or 'these inputs'}: {first_line(error)}"
        ) from error


def forward(module: nn.Module, batch: InputsLike | Batch) -> Any:
    """Return the module's output."""
    args, kwargs = fitting(module, batch)
    with explain_input_errors(module, args, kwargs):
        return module(*args, **kwargs)


def find_first_tensor(inputs: InputsLike) -> Tensor:
    """Return the first tensor among the inputs; its leading axis is the batch."""
    args, kwargs = arguments(inputs)
    for candidate in (*args, *kwargs.values()):
        if isinstance(candidate, Tensor):
            return candidate
    raise InputError("a batch contains no tensor; expected a tensor, a tuple or a mapping with one")
