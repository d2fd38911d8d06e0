"""What is wrong with a recipe, problem by problem, and in which line of its text."""

from __future__ import annotations

import re
from typing import Any

import yaml

#: A place as messages name it: `parameters.density: …`, `models[1].weight: …`.
_PLACE = re.compile(r"(?:recipe: )?([A-Za-z_][\w-]*(?:\[\d+\]|\.[\w-]+)*):")
_STEP = re.compile(r"\[(\d+)\]|([\w-]+)")


def list_problems(message: str, text: str) -> list[dict[str, Any]]:
    """Return one entry for each problem of an error about a recipe.

    Args:
        message: The message of the error, which may hold several problems, one a line.
        text: The recipe.

    Returns:
        For each problem its `message`, and its `line`, from 1, or None where it is about the recipe as a whole.
    """
    heading, *lines = message.split("\n")
    told = [line.strip() for line in lines if line.strip()] if re.search(r"\d+ problems$", heading) else [message]
    return [{"message": each.removeprefix("recipe: "), "line": _line(each, text)} for each in told]


def _line(message: str, text: str) -> int | None:
    if known := re.search(r"\bline (\d+)", message):
        return int(known[1])
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError:
        return None
    place = _PLACE.match(message)
    steps = _STEP.findall(place[1]) if place else []
    quoted = re.findall(r"'([^']+)'", message)
    line, node = None, root
    for index, name in [*steps, *(("", word) for word in quoted[:1])]:
        found = _child(node, int(index) if index else name)
        if found is None:
            break
        line, node = found
    return line


def _child(node: Any, step: int | str) -> tuple[int, Any] | None:
    """The line and the node that a key or an index leads to."""
    if isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
        return node.value[step].start_mark.line + 1, node.value[step]
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.value == step:
                return key.start_mark.line + 1, value
    return None
