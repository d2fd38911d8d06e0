"""Quantisation of the output's weights as they are written."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from merganser.errors import RecipeError, did_you_mean

if TYPE_CHECKING:
    from merganser.engine.merge import Merge

#: FP8 as compressed-tensors stores it, and types of GGUF; llama.cpp's library writes those ending in "_k".
QUANTISATIONS = ("fp8", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "q6_k", "q5_k", "q4_k", "q3_k", "q2_k")
#: Mixtures of K-quants, such as Q4_K_M.
_MIXTURE = re.compile(r"(q[2-6]_k)_([sml]|xl|xs)")


def check_quantisation(given: str) -> str:
    """Check the name of a quantised format and return it.

    Raises:
        RecipeError: If the format is unknown or cannot be written.
    """
    name = given.lower()
    if mixed := _MIXTURE.fullmatch(name):
        raise RecipeError(
            f"output.quantize: {given} is a mixture of types that llama.cpp chooses; use {mixed[1]} for one type, or "
            f"write q8_0 and run llama.cpp's `llama-quantize` on it with {given.upper()} (the guide on formats has the "
            "command)"
        )
    if name not in QUANTISATIONS:
        known = ", ".join(QUANTISATIONS)
        raise RecipeError(
            f"output.quantize: unknown format {given!r}{did_you_mean(given, QUANTISATIONS)}; known: {known}"
        )
    return name


def quantise(merge: Merge, form: str | None) -> Merge:
    """Return a merge whose weights are quantised as they are written; without a format, the merge itself."""
    if form is None:
        return merge
    from merganser.engine.float8 import quantise_to_float8
    from merganser.engine.gguf_output import quantise_to_gguf

    return quantise_to_float8(merge) if form == "fp8" else quantise_to_gguf(merge, form)
