"""Recognise documents of mergekit's other programs, which are not merge recipes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from merganser.errors import RecipeError

#: A key that only another program of mergekit uses -> the kind of document, and what to do instead.
_OTHER_TOOLS = {
    "experts": (
        "a mixture-of-experts configuration (mergekit-moe)",
        "use merganser moe",
    ),
    "gate_mode": (
        "a mixture-of-experts configuration (mergekit-moe)",
        "use merganser moe",
    ),
    "genome": ("a search configuration (mergekit-evolve)", "use merganser evolve run"),
    "donor": ("a tokenizer transplant (mergekit-tokensurgeon)", "use merganser transplant-tokenizer"),
    "layer_slices": ("a bakllama configuration", "write it as slices: [{sources: [{model: …, layer_range: [a, b]}]}]"),
}


def refuse_other_tools(data: Mapping[str, Any]) -> None:
    """Raise an error that names the kind of document, if it is not a merge."""
    found = [tool for key, tool in _OTHER_TOOLS.items() if key in data]
    if data.get("merge_method", data.get("method")) == "moe":
        found = [_OTHER_TOOLS["experts"]]
    elif "merge_method" in data or "method" in data:
        return
    if found:
        what, instead = found[0]
        raise RecipeError(f"this is {what}, not a merge; {instead}")
