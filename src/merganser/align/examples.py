"""Example inputs as the arguments of a forward pass, read alike by the derivation and by its self-test."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from typing import Any

from torch import nn

from merganser.modules.batches import Arguments, Inputs, arguments


def example_arguments(module: nn.Module, inputs: Inputs, kwargs: Mapping[str, Any] | None = None) -> Arguments:
    """Return positional and keyword arguments; models of transformers run without their cache unless told to."""
    args, own = arguments(inputs)
    named = {**own, **(kwargs or {})}
    if "use_cache" in signature(module.forward).parameters:
        named.setdefault("use_cache", False)
    return args, named
