"""The modules of a checkpoint's architecture without weights, built from its config on the meta device."""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Mapping, Set
from typing import TYPE_CHECKING, Any

from merganser.checkpoints.base import Checkpoint
from merganser.checkpoints.gguf_config import model_config
from merganser.lazy import torch
from merganser.strict_json import parse_json

if TYPE_CHECKING:
    from torch import nn


def build_skeleton(checkpoint: Checkpoint) -> nn.Module | None:
    """Return the model that a checkpoint's config describes, with parameters without values.

    Returns:
        The model, shared between calls. None if transformers is not installed or does not have the architecture of the
        config itself. Code in a checkpoint is never run.

    Example:
        >>> build_skeleton(open("model"))  # doctest: +SKIP
        LlamaForCausalLM(...)
    """
    config = model_config(checkpoint)
    if not isinstance(config.get("model_type"), str):
        return None
    return _build(json.dumps(config, sort_keys=True))


def build_from_config(config: Mapping[str, Any], device: str = "meta") -> nn.Module | None:
    """Build the model of a config for callers that modify it, with random weights if not on the meta device; None as
    in `build_skeleton`.
    """
    try:
        import transformers
    except (ImportError, RuntimeError):  # RuntimeError: an incompatible torchvision
        return None
    plain = {key: value for key, value in config.items() if key not in ("quantization_config", "auto_map")}
    named = config.get("architectures")
    name = named[0] if isinstance(named, list) and named and isinstance(named[0], str) else ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            settings = transformers.AutoConfig.for_model(**plain)
            built: Any = getattr(transformers, name, None)
            model: nn.Module
            with torch.device(device):
                own = isinstance(built, type) and issubclass(built, transformers.PreTrainedModel)
                model = built._from_config(settings) if own else transformers.AutoModel.from_config(settings)
            return model.eval()
        except Exception:  # an unknown config can fail in many ways
            return None


@functools.lru_cache(maxsize=4)
def _build(config: str) -> nn.Module | None:
    return build_from_config(parse_json(config))


def find_shared_parameters(model: nn.Module) -> dict[str, list[str]]:
    """Return the parameters that a model has under several names: each name -> all names."""
    found: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), []).append(name)
    return {name: names for names in found.values() if len(names) > 1 for name in names}


def build_plain_skeleton(checkpoint: Checkpoint, embeddings: Set[str] = frozenset()) -> nn.Module:
    """Build modules for a checkpoint without a config: Linear layers and convolutions, by the shapes of weights, and
    known embeddings.
    """
    root = torch.nn.Module()
    with torch.device("meta"):
        for name in (*checkpoint.names(), *checkpoint.aliases()):
            path, _, leaf = name.rpartition(".")
            shape = checkpoint.spec(name).shape
            if leaf == "weight" and 2 <= len(shape) <= 5:
                layer = _layer(shape, bias=f"{path}.bias" in checkpoint)
                if path in embeddings:
                    layer = torch.nn.Embedding(shape[0], shape[1])
            elif leaf == "bias" and f"{path}.weight" in checkpoint and checkpoint.spec(f"{path}.weight").shape[1:]:
                continue
            else:
                layer = None
            *outer, last = path.split(".") if layer is not None else [*path.split("."), ""]
            parent = root
            for step in filter(None, outer):
                if not hasattr(parent, step):
                    parent.add_module(step, torch.nn.Module())
                parent = getattr(parent, step)
            if layer is not None:
                parent.add_module(last, layer)
            else:
                parent.register_parameter(leaf, torch.nn.Parameter(torch.empty(shape), requires_grad=False))
    return root


def _layer(shape: tuple[int, ...], bias: bool) -> nn.Module:
    if len(shape) == 2:
        return torch.nn.Linear(shape[1], shape[0], bias=bias)
    kind = {3: torch.nn.Conv1d, 4: torch.nn.Conv2d, 5: torch.nn.Conv3d}[len(shape)]
    return kind(shape[1], shape[0], shape[2:], bias=bias)  # type: ignore[arg-type]
