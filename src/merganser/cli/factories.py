"""`pkg.module:factory` on a command line: user code that builds a network."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from merganser.errors import InputError
from merganser.evaluate.references import imported

if TYPE_CHECKING:
    from torch import nn

    from merganser.align import Symmetry


def build_network(text: str, shape: str | None = None) -> tuple[nn.Module, Any]:
    """Return the module and example inputs of a factory that can be imported from the current directory.

    Inputs come from `shape` ("1x3x32x32"), from the factory if it returns (module, inputs), or from the module's own
    `example_input_array` or `dummy_inputs` (the conventions of Lightning and transformers); they are None if there are
    none of these. Every problem with the factory raises `InputError`.
    """
    from torch import nn

    try:
        made = imported(text, "--model")()
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"--model {text}: the factory failed with {type(error).__name__}: {error}") from error
    module, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(module, nn.Module):
        got = f"the class {module.__name__} itself" if isinstance(module, type) else type(module).__name__
        raise InputError(f"--model {text}: expected an nn.Module, or (nn.Module, example_inputs), got {got}")
    if shape is not None:
        inputs = _zeros(shape)
    for attribute in ("example_input_array", "dummy_inputs"):
        if inputs is None:
            inputs = getattr(module, attribute, None)
    return module, inputs


def derive_symmetry(model: str, shape: str | None, **options: Any) -> Symmetry:
    """Return the symmetry of the network that a factory builds, with the options of `align.symmetry`."""
    from merganser import align

    network, inputs = build_network(model, shape)
    if inputs is None:
        raise InputError(
            f"--model {model}: tracing the symmetry needs an example input: return (module, example_inputs) from the "
            "factory, or give its shape, e.g. --shape 1x784"
        )
    return align.symmetry(network, inputs, **options)


def _zeros(shape: str) -> Any:
    import torch

    if not re.fullmatch(r"\d+([x,]\d+)*", shape):
        raise InputError(f"--shape {shape}: separate the sizes by x, e.g. 1x3x32x32")
    sizes = [int(size) for size in re.split("[x,]", shape)]
    if 0 in sizes:
        raise InputError(f"--shape {shape}: every size must be at least 1")
    return torch.zeros(sizes)
