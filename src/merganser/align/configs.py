"""Symmetries of models of transformers, derived from the config beside their weights."""

from __future__ import annotations

from typing import Any

import torch

from merganser.align.derivation import symmetry
from merganser.align.symmetries import Symmetry
from merganser.checkpoints.base import Checkpoint
from merganser.checkpoints.json_file import read_config
from merganser.checkpoints.skeleton import build_from_config
from merganser.errors import InputError

#: Largest network, in parameters, that is built to self-test its symmetry.
TESTED = 50_000_000
ADVICE = "derive its symmetry from a module: mg.align.symmetry(module, inputs)"


def symmetry_from_config(checkpoint: Checkpoint, *, advice: str = ADVICE, **options: Any) -> tuple[Symmetry, bool]:
    """Derive the symmetry of a model of transformers, whose network is built from its config.

    Args:
        checkpoint: The model.
        advice: What to do instead, for the message if transformers cannot build the network, or not as it was saved.
        **options: Options of `symmetry`.

    Returns:
        The symmetry, and whether it was self-tested. A network of more than 50 million parameters is traced without
        weights, and not tested.

    Raises:
        InputError: If transformers does not know the model, its network does not run on a small batch, or it has other
            names than the checkpoint.

    Example:
        >>> symmetry, tested = mg.align.symmetry_from_config(mg.open("llama"))  # doctest: +SKIP
    """
    tested = sum(checkpoint.spec(name).numel for name in checkpoint.names()) <= TESTED
    device = "cpu" if tested else "meta"
    network = build_from_config(read_config(checkpoint.directory), device)
    if network is None:
        raise InputError(f"{checkpoint.label} has no config of a model that transformers knows: {advice}")
    try:
        found = symmetry(network, make_small_batch(network, device), self_test=tested, **options)
    except InputError as error:
        if "does not run on the example inputs" not in str(error):
            raise
        raise InputError(f"{error}; {advice}") from error
    if odd := next((name for name in checkpoint.names() if name not in found.axes), None):
        raise InputError(
            f"{checkpoint.label} has {odd!r}, which {type(network).__name__} of the installed transformers does not "
            f"have under this name: {advice}"
        )
    return found, tested


def make_small_batch(network: Any, device: str) -> dict[str, Any]:
    """Return a small batch for a model of transformers, by what it reads: tokens, an image, both, or a spectrogram."""
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
