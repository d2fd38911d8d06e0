"""Pairwise matching by name: find the permutations that map model b to the space of model a."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from merganser.align.activations import activation_matching
from merganser.align.matches import Match
from merganser.align.pairwise import frank_wolfe_matching, weight_matching
from merganser.align.state import check_symmetry
from merganser.align.straight_through import straight_through
from merganser.align.symmetries import Symmetry
from merganser.checkpoints.opening import Reference
from merganser.errors import InputError, did_you_mean, one_of

METHODS: Mapping[str, Callable[..., Match]] = {
    "weights": weight_matching,
    "activations": activation_matching,
    "ste": straight_through,
    "frank_wolfe": frank_wolfe_matching,
}


def match(a: Reference, b: Reference, symmetry: Symmetry, method: str = "weights", **options: Any) -> Match:
    """Match model b to model a.

    Args:
        a: The model that stays.
        b: The model whose units are permuted.
        symmetry: The symmetry of the architecture, from `mg.align.symmetry`.
        method: `"weights"` (coordinate ascent) and `"frank_wolfe"` need weights alone, `"activations"` modules and
            `batches`, `"ste"` a module, `batches` and `loss`.
        **options: Options of `weight_matching`, `frank_wolfe_matching`, `activation_matching` or `straight_through`.

    Returns:
        The permutations, with the objective that was reached.

    Raises:
        InputError: If the method is unknown, or the models do not fit the symmetry.

    Example:
        >>> first, second = models[:2]
        >>> match = mg.align.match(first, second, mg.align.symmetry(first, images))
        >>> moved = match.apply(second)
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
