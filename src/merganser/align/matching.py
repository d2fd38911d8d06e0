"""Pairwise matching by name: the permutations that put model b in the space of model a."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from merganser.align.activations import activation_matching
from merganser.align.matches import Match
from merganser.align.pairwise import frank_wolfe_matching, weight_matching
from merganser.align.state import Model, check_symmetry
from merganser.align.straight_through import straight_through
from merganser.align.symmetries import Symmetry
from merganser.errors import InputError, did_you_mean, one_of

METHODS: Mapping[str, Callable[..., Match]] = {
    "weights": weight_matching,
    "activations": activation_matching,
    "ste": straight_through,
    "frank_wolfe": frank_wolfe_matching,
}


def match(a: Model, b: Model, symmetry: Symmetry, method: str = "weights", **options: Any) -> Match:
    """Match b to a by "weights", "frank_wolfe", "activations" or "ste".

    The first two need weights alone. "activations" wants modules and `batches`, "ste" a module, `batches` and `loss`.
    The options are those of `weight_matching`, `frank_wolfe_matching`, `activation_matching`, `straight_through`.
    """
    one_of("matching method", method, METHODS)
    check_symmetry(symmetry)
    known = {p.name: p for p in inspect.signature(METHODS[method]).parameters.values() if p.kind is p.KEYWORD_ONLY}
    for option in options:
        if option not in known:
            raise InputError(f"matching method {method!r} has no option {option!r}{did_you_mean(option, known)}")
    for name, parameter in known.items():
        if parameter.default is parameter.empty and name not in options:
            raise InputError(f"matching method {method!r} needs {name}=…")
    return METHODS[method](a, b, symmetry, **options)
