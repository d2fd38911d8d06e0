"""The parameters that mergekit's methods read, and notes on those they ignore.

mergekit looks a parameter up by its own name only and silently ignores every other. A recipe in its dialect means the
same here: parameters in this table have an effect, others have none and are noted. Methods that mergekit does not have
accept all their parameters, in either spelling.
"""

from __future__ import annotations

from collections.abc import Mapping

from merganser.methods.base import Method
from merganser.methods.registry import aliases, parameters

_TASK_VECTORS = ("weight", "normalize", "lambda")
_SPARSE = (*_TASK_VECTORS, "density", "rescale")
#: Method -> the parameters that have an effect.
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
#: Parameters without any effect, and why.
WITHOUT_EFFECT = {
    "int8_mask": "masks take no memory here",
    "embed_slerp": "it belongs to an older mergekit; output rows follow the tokenizer settings",
}
#: Parameters with a slightly different effect, by method and name.
REMARKS = {
    ("multislerp", "eps"): "here it is only the length below which directions cancel; mergekit also adds it to lengths "
    "and angles, which matters unless it is tiny",
}
#: Methods that compute more precisely than mergekit's.
MORE_PRECISE = {
    "arcee_fusion": "divergences are computed in float64; in mergekit's float32, rounding decides about entries near "
    "the threshold, and about most entries of small task vectors",
}
KNOWN = frozenset(name for names in ACTING.values() for name in names) | WITHOUT_EFFECT.keys()


def list_acting(called: str, method: type[Method]) -> dict[str, str]:
    """Return the parameters with an effect on the method a recipe names: name in the recipe -> our name."""
    own = {name: name for name in parameters(method)} | aliases(method)
    return {name: own[name] for name in ACTING[called]} if called in ACTING else own


def list_required(called: str) -> tuple[str, ...]:
    """Return the per-model parameters without a default in mergekit."""
    return ("weight",) if "weight" in ACTING.get(called, ()) else ()


def explain_no_effect(name: str, called: str, method: type[Method]) -> str | None:
    """Return why a parameter has no effect, or None if no method knows it."""
    if name in WITHOUT_EFFECT:
        return WITHOUT_EFFECT[name]
    names = list_acting(called, method)
    own = {each: each for each in parameters(method)} | aliases(method)
    if name in own:
        spelt = next((each for each, meant in names.items() if meant == own[name]), None)
        if spelt is not None:
            return f"in this dialect it is called {spelt!r}"
        return f"mergekit's {called!r} has no such parameter; it has an effect in a native recipe"
    return f"method {called!r} does not use it" if name in KNOWN else None
