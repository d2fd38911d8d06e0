"""`pkg.module:factory` on a command line: the user's own code that builds a network."""

from __future__ import annotations

import os
import re
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from merganser.errors import InputError, did_you_mean

if TYPE_CHECKING:
    from torch import nn


def build_network(text: str, shape: str | None = None) -> tuple[nn.Module, Any]:
    """The module and example inputs of a factory importable from the current directory.

    Inputs come from `shape` ("1x3x32x32"), from the factory when it returns (module, inputs), or from the module's own
    `example_input_array` or `dummy_inputs` (the conventions of Lightning and transformers).
    """
    from torch import nn

    try:
        made = load_factory(text)()
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"--model {text}: the factory failed with {type(error).__name__}: {error}") from error
    module, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(module, nn.Module):
        raise InputError(
            f"--model {text}: expected an nn.Module, or (nn.Module, example_inputs), got {type(module).__name__}"
        )
    if shape is not None:
        inputs = _zeros(shape)
    for attribute in ("example_input_array", "dummy_inputs"):
        if inputs is None:
            inputs = getattr(module, attribute, None)
    if inputs is None:
        raise InputError(
            f"--model {text}: the symmetry is traced on an example input: return (module, example_inputs) from the "
            "factory, or give its shape, e.g. --shape 1x784"
        )
    return module, inputs


def load_factory(text: str) -> Any:
    """The callable that `pkg.module:name` names, with the current directory importable as `python -m` has it."""
    path, separator, name = text.partition(":")
    if not separator or not path or not name:
        raise InputError(f"--model {text}: name the factory as pkg.module:function")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = import_module(path)
    except ModuleNotFoundError as error:
        if error.name is not None and (path == error.name or path.startswith(f"{error.name}.")):
            raise InputError(f"--model {text}: no module {path!r} here or installed") from None
        raise InputError(f"--model {text}: importing {path!r} failed: {error}") from error
    except Exception as error:
        raise InputError(f"--model {text}: importing {path!r} failed: {type(error).__name__}: {error}") from error
    found = getattr(module, name, None)
    if not callable(found):
        public = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise InputError(f"--model {text}: {path!r} has no function {name!r}{did_you_mean(name, public)}")
    return found


def _zeros(shape: str) -> Any:
    import torch

    if not re.fullmatch(r"\d+([x,]\d+)*", shape):
        raise InputError(f"--shape {shape}: write sizes with x between them, e.g. 1x3x32x32")
    return torch.zeros([int(size) for size in re.split("[x,]", shape)])
