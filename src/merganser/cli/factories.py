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

#: Largest transformers network, in parameters, that is built to self-test its symmetry.
TESTED = 50_000_000


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


def derive_from_config(checkpoint: Checkpoint, instead: str, **options: Any) -> tuple[Symmetry, bool]:
    """Return the symmetry of a model of transformers, built from its config, and whether it was self-tested.

    `instead` says in messages what else the command offers if the model cannot be built.
    """
    from merganser import align
    from merganser.checkpoints.json_file import read_config
    from merganser.checkpoints.skeleton import new_skeleton

    tested = sum(checkpoint.spec(name).numel for name in checkpoint.names()) <= TESTED
    device = "cpu" if tested else "meta"
    network = new_skeleton(read_config(checkpoint.directory), device)
    if network is None:
        raise InputError(
            f"{checkpoint.label} has no config of a model that transformers knows: name a function that returns the "
            f"network (--model net:build --shape 1x8), or {instead}"
        )
    inputs = example_of(network, device)
    try:
        found = align.symmetry(network, inputs, self_test=tested, **options)
    except InputError as error:
        if "does not run on the example inputs" not in str(error):
            raise
        raise InputError(
            f"{error}; name a function that returns the network and inputs it runs on: --model net:build"
        ) from error
    if odd := next((name for name in checkpoint.names() if name not in found.axes), None):
        raise InputError(
            f"{checkpoint.label} has {odd!r}, which {type(network).__name__} of the installed transformers does not "
            "have under this name: name a function that returns a network with the names of the checkpoint "
            f"(--model net:build), or {instead}"
        )
    return found, tested


def load_batches(text: str) -> list[Any]:
    """Return the labelled batches that a function returns. Every problem with it raises `InputError`."""
    from merganser.modules.batches import labelled

    try:
        found = list(import_function(text, "--batches")())
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"--batches {text}: the function failed with {type(error).__name__}: {error}") from error
    if not found:
        raise InputError(f"--batches {text}: the function returned no batches")
    for batch in found:
        labelled(batch, f"--batches {text}")
    return found


def example_of(network: Any, device: str) -> dict[str, Any]:
    """Return a small batch for a model of transformers, by what it reads: tokens, an image, both, or a spectrogram."""
    import torch

    config, main = network.config, network.main_input_name
    vision = getattr(config, "vision_config", config)
    found = dict(network.dummy_inputs)
    if main == "pixel_values" or hasattr(network, "vision_model"):
        size = getattr(vision, "image_size", 64)
        sides = [size, size] if isinstance(size, int) else list(size)
        found["pixel_values"] = torch.zeros(1, getattr(vision, "num_channels", 3), *sides)
    elif main == "input_features" and hasattr(config, "num_mel_bins"):
        found[main] = torch.zeros(1, config.num_mel_bins, 2 * config.max_source_positions)
    if main != "input_ids" and main in found:
        tokens = found.pop("input_ids", None)
        found |= {"decoder_input_ids": tokens[:1]} if config.is_encoder_decoder else {}
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in found.items()}


def _zeros(shape: str) -> Any:
    import torch

    if not re.fullmatch(r"\d+([x,]\d+)*", shape):
        raise InputError(f"--shape {shape}: separate the sizes by x, e.g. 1x3x32x32")
    sizes = [int(size) for size in re.split("[x,]", shape)]
    if 0 in sizes:
        raise InputError(f"--shape {shape}: every size must be at least 1")
    return torch.zeros(sizes)
