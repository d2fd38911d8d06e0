"""Many experts of one base: the library (TSV-Compress), interference, adapters in and out, input-adaptive merging."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_NAMES = {
    "AdaptiveModel": "merganser.experts.adaptive",
    "Limits": "merganser.experts.batching",
    "Oracle": "merganser.experts.baselines",
    "Smile": "merganser.experts.baselines",
    "Static": "merganser.experts.baselines",
    "TwinMerging": "merganser.experts.baselines",
    "WeMoE": "merganser.experts.baselines",
    "create_app": "merganser.experts.serving",
    "Library": "merganser.experts.library",
    "MaskLibrary": "merganser.experts.masks",
    "Interference": "merganser.experts.survey",
    "interference": "merganser.experts.survey",
    "decode": "merganser.experts.textspan",
    "extract_lora": "merganser.experts.lora",
    "merge_adapters": "merganser.experts.lora",
    "MlpRouter": "merganser.experts.routing",
    "NearestNeighbour": "merganser.experts.routing",
    "ProjectionRouter": "merganser.experts.routing",
    "score_layers": "merganser.experts.layers",
    "sweep_layers": "merganser.experts.layers",
}

__all__ = [
    "AdaptiveModel",
    "Interference",
    "Library",
    "Limits",
    "MaskLibrary",
    "MlpRouter",
    "NearestNeighbour",
    "Oracle",
    "ProjectionRouter",
    "Smile",
    "Static",
    "TwinMerging",
    "WeMoE",
    "create_app",
    "decode",
    "extract_lora",
    "interference",
    "merge_adapters",
    "score_layers",
    "sweep_layers",
]

if TYPE_CHECKING:
    from merganser.experts.adaptive import AdaptiveModel
    from merganser.experts.baselines import Oracle, Smile, Static, TwinMerging, WeMoE
    from merganser.experts.batching import Limits
    from merganser.experts.layers import score_layers, sweep_layers
    from merganser.experts.library import Library
    from merganser.experts.lora import extract_lora, merge_adapters
    from merganser.experts.masks import MaskLibrary
    from merganser.experts.routing import MlpRouter, NearestNeighbour, ProjectionRouter
    from merganser.experts.serving import create_app
    from merganser.experts.survey import Interference, interference
    from merganser.experts.textspan import decode


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        return getattr(import_module(_NAMES[name]), name)
    raise AttributeError(f"module 'merganser.experts' has no attribute {name!r}")
