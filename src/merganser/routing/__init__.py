"""One model over many experts that chooses and merges experts for each input: MASS, baselines, and a server.

Start with `AdaptiveModel`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from merganser.lazy import exports

__getattr__, __dir__, __all__ = exports(
    __name__,
    {
        "adaptive": ("AdaptiveModel",),
        "baselines": ("Oracle", "Smile", "Static", "TwinMerging", "WeMoE"),
        "batching": ("Limits",),
        "heads": ("NamedHead",),
        "layers": ("score_layers", "sweep_layers"),
        "listening": ("create_server",),
        "predictions": ("Prediction",),
        "routers": ("CalibratedRouter", "MlpRouter", "NearestNeighbour", "ProjectionRouter"),
        "sensitivity": ("sweep_choice", "sweep_redundancy"),
        "serving": ("create_app",),
        "textspan": ("decode",),
    },
)

if TYPE_CHECKING:
    from merganser.routing.adaptive import AdaptiveModel as AdaptiveModel
    from merganser.routing.baselines import Oracle as Oracle
    from merganser.routing.baselines import Smile as Smile
    from merganser.routing.baselines import Static as Static
    from merganser.routing.baselines import TwinMerging as TwinMerging
    from merganser.routing.baselines import WeMoE as WeMoE
    from merganser.routing.batching import Limits as Limits
    from merganser.routing.heads import NamedHead as NamedHead
    from merganser.routing.layers import score_layers as score_layers
    from merganser.routing.layers import sweep_layers as sweep_layers
    from merganser.routing.listening import create_server as create_server
    from merganser.routing.predictions import Prediction as Prediction
    from merganser.routing.routers import CalibratedRouter as CalibratedRouter
    from merganser.routing.routers import MlpRouter as MlpRouter
    from merganser.routing.routers import NearestNeighbour as NearestNeighbour
    from merganser.routing.routers import ProjectionRouter as ProjectionRouter
    from merganser.routing.sensitivity import sweep_choice as sweep_choice
    from merganser.routing.sensitivity import sweep_redundancy as sweep_redundancy
    from merganser.routing.serving import create_app as create_app
    from merganser.routing.textspan import decode as decode
