"""Depth, read off the names: no architecture is known here.

A stack is a run of like layers: names that agree up to a number (`model.layers.7.…`, `h.7.…`, `encoder.block.7.…`).
The main stack is the one with the most tensors; names such as `layer3.…` or `fc2.…` make a stack only if it is the main
one.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field

_USUAL = ("layers", "layer", "h", "block", "blocks")
_INPUT = re.compile(
    r"embed|(^|\.)(wte|wpe|shared|conv\d*|bn\d*|ln_pre|norm_pre|pre_\w+|stem)(\.|$)|patch|token|position|(^|[._])pos([._]|$)"
)
_OUTPUT = re.compile(r"embed_out|unembed|head|predictions|classifier")


@dataclass(frozen=True)
class Stack:
    """Layers `prefix.<stem><number>.rest`; `numbers` ascend."""

    prefix: str
    stem: str
    numbers: tuple[int, ...]
    tensors: int

    @property
    def layers(self) -> int:
        return len(self.numbers)

    @property
    def title(self) -> str:
        return f"{self.prefix}.{self.stem}" if self.prefix and self.stem else self.prefix or self.stem or "(top)"

    def name(self, number: int, rest: str) -> str:
        return ".".join(part for part in (self.prefix, f"{self.stem}{number}", rest) if part)

    def depth(self, number: int) -> float:
        """t ∈ [0, 1] from the first layer to the last; 1 for a lone layer, as mergekit has it."""
        return bisect_left(self.numbers, number) / (self.layers - 1) if self.layers > 1 else 1.0


@dataclass(frozen=True)
class Place:
    """Where in which stack a tensor stands."""

    stack: Stack
    number: int
    rest: str


@dataclass(frozen=True)
class Layout:
    """The stacks of a checkpoint, and the place of each of its tensors that is in one."""

    stacks: tuple[Stack, ...]
    main: Stack | None
    places: dict[str, Place] = field(repr=False)


def layout(names: Iterable[str]) -> Layout:
    """Find the stacks; linear in the number of names."""
    names = list(names)
    numbers: dict[tuple[str, str], set[int]] = {}
    counts: dict[tuple[str, str], int] = {}
    positions: dict[str, list[tuple[tuple[str, str], int, str]]] = {}
    for name in names:
        found = positions[name] = list(_numbered(name))
        for key, number, _ in found:
            numbers.setdefault(key, set()).add(number)
            counts[key] = counts.get(key, 0) + 1
    eligible = [key for key in counts if len(numbers[key]) > 1 or _is_usual(key)]
    best = max(eligible, key=lambda key: (counts[key], -len(key[0])), default=None)
    stacks = {
        key: Stack(*key, tuple(sorted(numbers[key])), counts[key]) for key in eligible if not key[1] or key == best
    }
    places: dict[str, Place] = {}
    used: dict[tuple[str, str], Stack] = {}
    for name, found in positions.items():
        for key, number, rest in found:
            if key in stacks:
                places[name] = Place(stacks[key], number, rest)
                used[key] = stacks[key]
                break
    return Layout(tuple(used.values()), stacks[best] if best else None, places)


def _numbered(name: str) -> Iterable[tuple[tuple[str, str], int, str]]:
    parts = name.split(".")
    for i, part in enumerate(parts):
        digits = len(part) - len(part.rstrip("0123456789"))
        if digits:
            stem = part[:-digits]
            yield (".".join(parts[:i]), stem), int(part[-digits:]), ".".join(parts[i + 1 :])


def _is_usual(key: tuple[str, str]) -> bool:
    return not key[1] and key[0].rpartition(".")[2] in _USUAL


def is_input(name: str) -> bool:
    """Whether a tensor outside the stacks stands before them (embeddings, stems) rather than after (norms, heads)."""
    return _INPUT.search(name) is not None and _OUTPUT.search(name) is None
