"""Genomes that say which layer stands where: values that change at a layer, and stacks of other models' layers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

#: The parameter of a space that chooses the layer at each place of the stack.
LAYERS = "layers"
_PICK = re.compile(r"(.*)([+-]\d+)")


def layer_options(labels: Sequence[str], reach: int) -> tuple[str, ...]:
    """Return what may stand at a place: the layer of each model there, and those up to `reach` before and after it.

    Example:
        >>> layer_options(["math", "code"], 1)
        ('math+0', 'code+0', 'math-1', 'code-1', 'math+1', 'code+1')
    """
    offsets = [0, *(sign * step for step in range(1, reach + 1) for sign in (-1, 1))]
    return tuple(f"{label}{offset:+d}" for offset in offsets for label in labels)


def stack_layers(document: Mapping[str, Any], labels: Sequence[str], picks: Sequence[str]) -> dict[str, Any]:
    """Return the recipe with slices instead of models: in every place, the layer that was picked. A pick before the
    first or after the last layer of its model takes the first or the last.
    """
    paths = dict(zip(labels, (model["path"] for model in document["models"]), strict=True))
    slices: list[dict[str, Any]] = []
    for place, pick in enumerate(picks):
        found = _PICK.fullmatch(pick)
        assert found is not None
        path, layer = paths[found[1]], min(max(place + int(found[2]), 0), len(picks) - 1)
        if slices and slices[-1]["path"] == path and slices[-1]["layers"][1] == layer:
            slices[-1]["layers"][1] += 1
        else:
            slices.append({"path": path, "layers": [layer, layer + 1]})
    return {**{key: value for key, value in document.items() if key != "models"}, "slices": slices}
