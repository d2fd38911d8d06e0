"""`pkg.module:factory` on a command line: user code that builds a network."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from merganser.errors import InputError
from merganser.evaluate.references import import_function

if TYPE_CHECKING:
    from torch import nn

    from merganser.align import Symmetry
    from merganser.checkpoints import Checkpoint


def build_network(text: str, shape: str | None = None) -> tuple[nn.Module, Any]:
    """Return the module and example inputs of a factory that can be imported from the current directory.

    Inputs come from `shape` ("1x3x32x32"), from the factory if it returns (module, inputs), or from the module's own
    `example_input_array` or `dummy_inputs` (the conventions of Lightning and transformers); they are None if there are
    none of these. Every problem with the factory raises `InputError`.
    """
    from torch import nn

    try:
        made = import_function(text, "--model")()
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"--model {text}: the factory failed with {type(error).__name__}: {error}") from error
    module, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(module, nn.Module):
        got = f"the class {module.__name__} itself" if isinstance(module, type) else type(module).__name__
        raise InputError(f"--model {text}: expected an nn.Module, or (nn.Module, example_inputs), got {got}")
    if shape is not None:
        inputs = _make_zeros(shape)
    for attribute in ("example_input_array", "dummy_inputs"):
        if inputs is None:
            inputs = getattr(module, attribute, None)
    return module, inputs


def derive_symmetry(
    checkpoint: Checkpoint, model: str | None, shape: str | None, instead: str, **options: Any
) -> tuple[Symmetry, bool]:
    """Return the symmetry of the network that --model names, or of the config of a checkpoint; and whether it was
    self-tested. `instead` says in messages what else the command offers.
    """
    from merganser import align

    if model is None:
        advice = f"name a function that returns the network and inputs it runs on (--model net:build), or {instead}"
        return align.symmetry_from_config(checkpoint, advice=advice, **options)
    network, inputs = build_network(model, shape)
    if inputs is None:
        raise InputError(
            f"--model {model}: tracing the symmetry needs an example input: return (module, example_inputs) from the "
            "factory, or give its shape, e.g. --shape 1x784"
        )
    return align.symmetry(network, inputs, **options), True


def load_batches(text: str) -> list[Any]:
    """Return the labelled batches that a function returns. Every problem with it raises `InputError`."""
    from merganser.modules.batches import require_targets

    try:
        found = list(import_function(text, "--batches")())
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"--batches {text}: the function failed with {type(error).__name__}: {error}") from error
    if not found:
        raise InputError(f"--batches {text}: the function returned no batches")
    for batch in found:
        require_targets(batch, f"--batches {text}")
    return found


def _make_zeros(shape: str) -> Any:
    import torch

    if not re.fullmatch(r"\d+([x,]\d+)*", shape):
        raise InputError(f"--shape {shape}: separate the sizes by x, e.g. 1x3x32x32")
    sizes = [int(size) for size in re.split("[x,]", shape)]
    if 0 in sizes:
        raise InputError(f"--shape {shape}: every size must be at least 1")
    return torch.zeros(sizes)
