"""Export a module with example arguments, or explain why it cannot be exported."""

from __future__ import annotations

import io
import logging
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import torch

from merganser.errors import InputError


def export(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.export.ExportedProgram:
    """Trace `module`, undecomposed.

    Raises:
        InputError: If the module does not run on these arguments, or its control flow depends on values of tensors.
    """
    try:
        with _silence():
            return torch.export.export(module, args, kwargs, strict=False)
    except Exception as error:
        name = type(module).__name__
        if (own := _find_failure(module, args, kwargs)) is not None:
            raise InputError(
                f"{name} does not run on the example inputs{_find_users_line(own)}: {_summarise(own)}"
            ) from own
        advice = (
            "models of transformers make no masks while they are traced: add attention_mask (and "
            "decoder_attention_mask) to the example inputs"
            if "'NoneType'" in str(error)
            else "torch.export needs a forward pass whose control flow does not depend on the values of tensors"
        )
        raise InputError(f"cannot trace {name}{_find_users_line(error)}: {_summarise(error)}; {advice}") from error


@contextmanager
def _silence() -> Iterator[None]:
    """Hide the graphs, tracebacks and warnings that torch prints while it traces."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with redirect_stderr(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _find_failure(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Exception | None:
    """Return the error without tracing, which means a wrong example, not an untraceable forward pass."""
    try:
        module(*args, **kwargs)
    except Exception as error:
        return error
    return None


def _summarise(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _find_users_line(error: BaseException) -> str:
    """Return `" at file:line (code)"` of the innermost frame outside PyTorch and this package."""
    ours = (Path(torch.__file__).parent, Path(__file__).parents[2])
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if path.is_file() and not any(path.is_relative_to(directory) for directory in ours):
            return f" at {frame.filename}:{frame.lineno} ({frame.line})"
    return ""
