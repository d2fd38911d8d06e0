"""Parse the body of a request into inputs of a module, or refuse it with a reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from merganser.errors import InputError, first_line
from merganser.modules.inputs import Inputs
from merganser.routing.batching import Limits
from merganser.strict_json import parse_json

#: From the request's `inputs` to the module's: a tokenizer, an image transform.
Encode = Callable[[Any], Any]


class Refused(Exception):
    """A request that gets an error status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


def parse(body: bytes, module: nn.Module, encode: Encode | None, limits: Limits) -> Inputs:
    """Return the inputs in a body: those that `encode` returns, or its arrays in the module's dtype."""
    try:
        content = parse_json(body)
    except ValueError as error:
        raise Refused(400, f"the body is not JSON: {first_line(error)}") from None
    if not isinstance(content, dict) or "inputs" not in content:
        raise Refused(422, 'the body must be an object with "inputs"')
    if unknown := sorted(set(content) - {"inputs"}):
        raise Refused(422, f'unknown field {unknown[0]!r}; only "inputs" is known')
    given = content["inputs"]
    if encode is not None:
        if isinstance(given, list):
            _check_size(len(given), limits)
        try:
            inputs = Inputs.of(encode(given))
        except InputError:
            raise
        except Exception as error:  # a user's function may raise anything for a user's input
            raise Refused(422, f"the inputs cannot be encoded: {first_line(error)}") from None
    elif isinstance(given, dict):
        inputs = Inputs((), {key: _tensor(value, f"inputs.{key}") for key, value in given.items()})
        inputs = cast_inputs(inputs, module)
    else:
        inputs = cast_inputs(Inputs((_tensor(given, "inputs"),)), module)
    sizes = {len(value) for value in (*inputs.args, *inputs.kwargs.values()) if isinstance(value, Tensor)}
    if len(sizes) != 1:
        raise Refused(422, f"all arrays need the same number of samples; found {sorted(sizes)}")
    _check_size(inputs.size, limits)
    return inputs


def _check_size(samples: int, limits: Limits) -> None:
    if not 1 <= samples <= limits.samples:
        raise Refused(422, f"{samples} samples in a request, between 1 and {limits.samples} are allowed")


def _tensor(value: Any, where: str) -> Tensor:
    if not isinstance(value, list):
        raise Refused(422, f"{where} must be an array with samples along its first axis")
    try:
        tensor = torch.tensor(value)
    except (ValueError, TypeError, RuntimeError, OverflowError):
        raise Refused(422, f"{where} must be a rectangular array of numbers") from None
    if 0 in tensor.shape[1:]:
        raise Refused(422, f"{where} has samples without numbers")
    if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
        raise Refused(422, f"{where} has entries that are infinite or NaN")
    return tensor


def cast_inputs(inputs: Inputs, module: nn.Module) -> Inputs:
    """Convert numbers to the dtype and device of the module's weights. Also integers (JavaScript writes 1.0 as 1),
    unless they are ids, which an embedding reads, or a mask. Refuse numbers that this dtype cannot hold.
    """
    like = next((weight for weight in module.parameters() if weight.is_floating_point()), None)
    if like is None:
        return inputs
    leaves = (part for part in module.modules() if next(part.children(), None) is None)
    first = next((part for part in leaves if next(part.parameters(), None) is not None), None)
    ids = isinstance(first, (nn.Embedding, nn.EmbeddingBag))

    def cast(name: str, tensor: Tensor) -> Tensor:
        whole = ids or name.endswith(("mask", "ids"))
        number = tensor.is_floating_point() or (tensor.dtype == torch.int64 and not whole)
        tensor = tensor.to(like) if number else tensor.to(like.device)
        if not bool(tensor.isfinite().all()):
            raise Refused(422, f"inputs{name and '.'}{name} has entries that {like.dtype} cannot hold")
        return tensor

    return Inputs(
        tuple(cast("", value) for value in inputs.args),
        {name: cast(name, value) for name, value in inputs.kwargs.items()},
    )
