"""Which parameters mergekit's methods read, and what to say of those they do not.

mergekit looks a parameter up by its own name alone and ignores every other without a word. A recipe in its dialect
means the same here: parameters in this table act, others have no effect and are noted. Methods that mergekit does not
have take all their parameters, in either spelling.
"""

from __future__ import annotations

from collections.abc import Mapping

from merganser.methods.base import Method
from merganser.methods.registry import aliases, parameters

_TASK_VECTORS = ("weight", "normalize", "lambda")
_SPARSE = (*_TASK_VECTORS, "density", "rescale")
#: Method -> the parameters that act on it.
ACTING: Mapping[str, tuple[str, ...]] = {
    "linear": ("weight", "normalize"),
    "slerp": ("t",),
    "nuslerp": ("weight", "nuslerp_flatten", "nuslerp_row_wise"),
    "multislerp": ("weight", "normalize_weights", "eps"),
    "karcher": ("max_iter", "tol"),
    "task_arithmetic": _TASK_VECTORS,
    "ties": _SPARSE,
    "dare_linear": _SPARSE,
    "dare_ties": _SPARSE,
    "della": (*_SPARSE, "epsilon"),
    "della_linear": (*_SPARSE, "epsilon"),
    "breadcrumbs": (*_SPARSE, "gamma"),
    "breadcrumbs_ties": (*_SPARSE, "gamma"),
    "model_stock": ("filter_wise",),
    "sce": ("select_topk",),
    "ram": ("epsilon",),
    "ramplus_tl": ("epsilon", "r", "alpha"),
    "nearswap": ("t",),
    "arcee_fusion": (),
    "passthrough": ("scale",),
}
#: Parameters without effect anywhere, and why.
WITHOUT_EFFECT = {
    "int8_mask": "masks cost no memory here",
    "embed_slerp": "it belongs to an older mergekit; output rows follow the tokenizer settings",
}
#: Parameters that act a little differently, by method and name.
REMARKS = {
    ("multislerp", "eps"): "here it is only the length below which directions cancel; mergekit adds it to lengths and "
    "angles as well, which shows unless it is tiny",
}
KNOWN = frozenset(name for names in ACTING.values() for name in names) | WITHOUT_EFFECT.keys()


def acting(called: str, method: type[Method]) -> dict[str, str]:
    """Return the parameters that act on the method a recipe names: the name in the recipe -> our own."""
    own = {name: name for name in parameters(method)} | aliases(method)
    return {name: own[name] for name in ACTING[called]} if called in ACTING else own


def required(called: str) -> tuple[str, ...]:
    """Return the per-model parameters for which mergekit has no default."""
    return ("weight",) if "weight" in ACTING.get(called, ()) else ()


def without_effect(name: str, called: str, method: type[Method]) -> str | None:
    """Return why a parameter has no effect, or None if no method knows it."""
    if name in WITHOUT_EFFECT:
        return WITHOUT_EFFECT[name]
    names = acting(called, method)
    own = {each: each for each in parameters(method)} | aliases(method)
    if name in own:
        spelt = next((each for each, meant in names.items() if meant == own[name]), None)
        if spelt is not None:
            return f"in this dialect it is called {spelt!r}"
        return f"mergekit's {called!r} has no such parameter; in a recipe of the native dialect it acts"
    return f"method {called!r} has nothing for it to act on" if name in KNOWN else None
