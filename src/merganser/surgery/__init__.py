"""Change the architecture of a model: its tokenizer, dense models as experts, and the order of experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from merganser.lazy import exports

__getattr__, __dir__, __all__ = exports(
    __name__,
    {
        "expert_matching": ("match_experts",),
        "mixtures": ("moe",),
        "moe_recipes": ("MoERecipe", "load_moe"),
        "transplants": ("transplant",),
    },
)

if TYPE_CHECKING:
    from merganser.surgery.expert_matching import match_experts as match_experts
    from merganser.surgery.mixtures import moe as moe
    from merganser.surgery.moe_recipes import MoERecipe as MoERecipe
    from merganser.surgery.moe_recipes import load_moe as load_moe
    from merganser.surgery.transplants import transplant as transplant
