"""Names of tensors as people read them: in blocks, and in the order of counting."""

from __future__ import annotations

import re


def block_of(name: str) -> str:
    """Return a tensor's block: its name up to the first number (`model.layers.3`), else its module."""
    match = re.match(r"(?:[^.]+\.)*?\d+(?=\.)", name)
    return match[0] if match else name.rpartition(".")[0] or name


def stack_of(block: str) -> str:
    """Return the stack a numbered block belongs to (`model.layers` of `model.layers.3`); another block is its own."""
    return re.sub(r"\.?\d+$", "", block) or block


def natural_order(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts names as people count: layer 2 before layer 10.

    Example:
        >>> sorted(["layers.10", "layers.2"], key=natural_order)
        ['layers.2', 'layers.10']
    """
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]
