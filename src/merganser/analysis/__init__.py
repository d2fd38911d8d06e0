"""Analyses in weight space: the theory of task vectors, trajectories, landscapes, similarity, disentanglement.

Modules load on first use: `merganser.analysis.gradients`, `.trajectory`, `.tangent`, `.disentanglement`, `.landscape`,
`.similarity`, `.alignments`, `.mergeability`, `.pair_losses`, `.plots`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from merganser.lazy import exports

__getattr__, __dir__, __all__ = exports(
    __name__,
    {},
    modules=(
        "alignments",
        "disentanglement",
        "gradients",
        "landscape",
        "mergeability",
        "pair_losses",
        "plots",
        "similarity",
        "tangent",
        "trajectory",
    ),
)

if TYPE_CHECKING:
    from merganser.analysis import alignments as alignments
    from merganser.analysis import disentanglement as disentanglement
    from merganser.analysis import gradients as gradients
    from merganser.analysis import landscape as landscape
    from merganser.analysis import mergeability as mergeability
    from merganser.analysis import pair_losses as pair_losses
    from merganser.analysis import plots as plots
    from merganser.analysis import similarity as similarity
    from merganser.analysis import tangent as tangent
    from merganser.analysis import trajectory as trajectory
