"""How far training moved a network from its initial weights: the guard printed in every card.

Matching networks that hardly left their initialisation aligns noise, so that a table made of them says nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

#: The median cosine above which a network counts as not trained.
LIMIT = 0.6


def layer_cosines(initial: Mapping[str, Tensor], trained: Mapping[str, Tensor]) -> dict[str, float]:
    """Return cos(θ_0, θ) of every weight matrix and kernel by name; vectors (biases, norms) are left out."""
    return {
        name: round(float(F.cosine_similarity(initial[name].double().flatten(), value.double().flatten(), dim=0)), 4)
        for name, value in trained.items()
        if value.ndim >= 2 and value.is_floating_point()
    }


def drift(initial: nn.Module, trained: nn.Module) -> dict[str, Any]:
    """Return the median of the layers' cosines, whether it is within the limit, and the cosines themselves."""
    cosines = layer_cosines(initial.state_dict(), trained.state_dict())
    median = statistics.median(cosines.values())
    return {"median_cosine": median, "left_initialisation": median <= LIMIT, "cosines": cosines}
