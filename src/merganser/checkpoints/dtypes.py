"""Dtypes by name: whoever takes one takes `torch.bfloat16`, `"bfloat16"` and `"bf16"` alike."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from merganser.errors import InputError, did_you_mean

#: What the weights of a checkpoint can be written in.
FLOATS = ("bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2")
ALIASES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}


def dtype_of(given: str | torch.dtype, known: Iterable[str] = FLOATS, what: str = "weights") -> torch.dtype:
    """The dtype that was named or given, if it is one of those `known` for `what`."""
    if not isinstance(given, (str, torch.dtype)):
        raise InputError(f"dtype: expected a name such as 'bfloat16' or a torch.dtype, got {given!r}")
    name = str(given).removeprefix("torch.")
    name = ALIASES.get(name, name)
    if name not in known:
        raise InputError(f"{name!r} is not a dtype of {what}{did_you_mean(name, known)}")
    found: torch.dtype = getattr(torch, name)
    return found


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
