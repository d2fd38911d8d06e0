"""Put the experts of a mixture in the order of another mixture's, without changing its function."""

from __future__ import annotations

from merganser.checkpoints.expert_orders import MatchedExperts
from merganser.checkpoints.layouts import convert_layout
from merganser.checkpoints.opening import Reference
from merganser.checkpoints.opening import open as open_checkpoint


def match_experts(model: Reference, reference: Reference) -> MatchedExperts:
    """Put the experts of a mixture in the order of another's, layer by layer; the model's function does not change.

    The order of a layer maximises Σ_e ⟨W_ref[e], W_model[π(e)]⟩ over the weights of the experts and their rows of the
    router (one linear assignment a layer). Experts stored one by one or fused, and any router with a row for each
    expert. Units inside an expert keep their order: mixtures that were trained apart need `mg.align` for those.

    Args:
        model: The mixture to reorder: a path, a hub id or an open checkpoint.
        reference: The mixture whose order it gets.

    Returns:
        The model as a checkpoint, reordered as it is read; `orders` has the old place of every expert of a layer.

    Raises:
        InputError: If there are no experts, or the mixtures differ in their layers; before any weights are read.

    Example:
        >>> mg.save(mg.surgery.match_experts("mixtral-b", "mixtral-a"), "out/")  # doctest: +SKIP
    """
    target, source = open_checkpoint(reference), open_checkpoint(model)
    return MatchedExperts(convert_layout(target, source), target)
