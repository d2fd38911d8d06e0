"""Quantisation of the output's weights as they are written."""

from __future__ import annotations

from merganser.engine.float8 import in_float8
from merganser.engine.gguf_output import in_gguf
from merganser.engine.merge import Merge
from merganser.errors import RecipeError, did_you_mean

#: FP8 as compressed-tensors stores it, and the GGUF types that the gguf library can write.
QUANTISATIONS = ("fp8", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")
#: GGUF types that only llama.cpp can write.
_UNWRITTEN = ("q2_k", "q3_k", "q4_k", "q4_k_m", "q4_k_s", "q5_k", "q5_k_m", "q5_k_s", "q6_k")


def check_quantisation(given: str) -> str:
    """Check the name of a quantised format and return it.

    Raises:
        RecipeError: If the format is unknown or cannot be written.
    """
    name = given.lower()
    if name in _UNWRITTEN:
        raise RecipeError(
            f"output.quantize: the gguf library cannot write {given}; write q8_0 and convert it to {given} with "
            "llama.cpp"
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
    return in_float8(merge) if form == "fp8" else in_gguf(merge, form)
