"""Documents of mergekit's other programs, which are no recipes of a merge."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from merganser.errors import RecipeError

#: Configurations of mergekit's other programs: a key only they have -> what they are, and what to do instead.
_OTHER_TOOLS = {
    "experts": (
        "a mixture-of-experts configuration (mergekit-moe)",
        "make it with merganser moe",
    ),
    "gate_mode": (
        "a mixture-of-experts configuration (mergekit-moe)",
        "make it with merganser moe",
    ),
    "genome": ("a search configuration (mergekit-evolve)", "merganser searches with: merganser evolve run"),
    "donor": ("a tokenizer transplant (mergekit-tokensurgeon)", "output.tokenizer unites vocabularies within a merge"),
    "layer_slices": ("a bakllama configuration", "write it as slices: [{sources: [{model: …, layer_range: [a, b]}]}]"),
}


def refuse_other_tools(data: Mapping[str, Any]) -> None:
    """An error that names what a file is, if it is no merge."""
    found = [tool for key, tool in _OTHER_TOOLS.items() if key in data]
    if data.get("merge_method", data.get("method")) == "moe":
        found = [_OTHER_TOOLS["experts"]]
    elif "merge_method" in data or "method" in data:
        return
    if found:
        what, instead = found[0]
        raise RecipeError(f"this is {what}, not a merge; {instead}")
