"""Names of tensors for people: blocks, stacks and natural order."""

from __future__ import annotations

import re


def block_of(name: str) -> str:
    """Return a tensor's block: its name up to the first number (`model.layers.3`), else its module."""
    match = re.match(r"(?:[^.]+\.)*?\d+(?=\.)", name)
    return match[0] if match else name.rpartition(".")[0] or name


def stack_of(block: str) -> str:
    """Return the stack of a numbered block (`model.layers` for `model.layers.3`); any other block is its own stack."""
    return re.sub(r"\.?\d+$", "", block) or block


def natural_order(name: str) -> list[tuple[int, str]]:
    """Return a key for natural sorting: layer 2 before layer 10.

    Example:
        >>> sorted(["layers.10", "layers.2"], key=natural_order)
        ['layers.2', 'layers.10']
    """
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]
