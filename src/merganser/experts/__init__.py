"""Many experts of one base: the library (TSV-Compress), interference, adapters in and out, input-adaptive merging."""

from __future__ import annotations

from typing import TYPE_CHECKING

from merganser.lazy import exports

__getattr__, __dir__, __all__ = exports(
    __name__,
    {
        "adaptive": ("AdaptiveModel",),
        "baselines": ("Oracle", "Smile", "Static", "TwinMerging", "WeMoE"),
        "batching": ("Limits",),
        "layers": ("score_layers", "sweep_layers"),
        "library": ("Library",),
        "listening": ("create_server",),
        "lora": ("extract_lora", "merge_adapters"),
        "masks": ("MaskLibrary",),
        "routing": ("MlpRouter", "NearestNeighbour", "ProjectionRouter"),
        "sensitivity": ("sweep_choice", "sweep_redundancy"),
        "serving": ("create_app",),
        "survey": ("Interference", "interference"),
        "textspan": ("decode",),
    },
)

if TYPE_CHECKING:
    from merganser.experts.adaptive import AdaptiveModel as AdaptiveModel
    from merganser.experts.baselines import Oracle as Oracle
    from merganser.experts.baselines import Smile as Smile
    from merganser.experts.baselines import Static as Static
    from merganser.experts.baselines import TwinMerging as TwinMerging
    from merganser.experts.baselines import WeMoE as WeMoE
    from merganser.experts.batching import Limits as Limits
    from merganser.experts.layers import score_layers as score_layers
    from merganser.experts.layers import sweep_layers as sweep_layers
    from merganser.experts.library import Library as Library
    from merganser.experts.listening import create_server as create_server
    from merganser.experts.lora import extract_lora as extract_lora
    from merganser.experts.lora import merge_adapters as merge_adapters
    from merganser.experts.masks import MaskLibrary as MaskLibrary
    from merganser.experts.routing import MlpRouter as MlpRouter
    from merganser.experts.routing import NearestNeighbour as NearestNeighbour
    from merganser.experts.routing import ProjectionRouter as ProjectionRouter
    from merganser.experts.sensitivity import sweep_choice as sweep_choice
    from merganser.experts.sensitivity import sweep_redundancy as sweep_redundancy
    from merganser.experts.serving import create_app as create_app
    from merganser.experts.survey import Interference as Interference
    from merganser.experts.survey import interference as interference
    from merganser.experts.textspan import decode as decode
