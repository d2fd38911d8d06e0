"""Find stacks of layers from tensor names, without knowing the architecture.

A stack is a sequence of similar layers: names that agree up to a number (`model.layers.7.…`, `h.7.…`,
`encoder.block.7.…`). The main stack is the one with the most tensors; names such as `layer3.…` or `fc2.…` make a stack
only if it is the main one.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

_USUAL = ("layers", "layer", "h", "block", "blocks")
_INPUT = re.compile(
    r"embed|(^|\.)(wte|wpe|shared|conv\d*|bn\d*|ln_pre|norm_pre|pre_\w+|stem)(\.|$)|patch|token|position|(^|[._])pos([._]|$)"
    r"|(^|[./])(conv_in|label_emb|(img|txt|time|vector|guidance)_in)\."
)
_OUTPUT = re.compile(r"embed_out|unembed|head|predictions|classifier")
#: Blocks of diffusion models that follow one another under one parent: one stretch of depth, in this order.
_CHAINS = (
    ("conv_in", "down_blocks", "mid_block", "up_blocks"),
    ("input_blocks", "middle_block", "output_blocks"),
    ("transformer_blocks", "single_transformer_blocks"),
    ("double_blocks", "single_blocks"),
)
#: Behind all networks of a block.
_AFTER = 1 << 20
_LINKS = {word: (chain, place) for chain, words in enumerate(_CHAINS) for place, word in enumerate(words)}


@dataclass(frozen=True)
class Stack:
    """Layers `prefix.<stem><number>.rest`; `numbers` are ascending."""

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
        """Return t ∈ [0, 1] from the first layer to the last; 1 for a single layer, as in mergekit."""
        return bisect_left(self.numbers, number) / (self.layers - 1) if self.layers > 1 else 1.0


@dataclass(frozen=True)
class Place:
    """The position of a tensor in a stack."""

    stack: Stack
    number: int
    rest: str


@dataclass(frozen=True)
class Layout:
    """The stacks of a checkpoint, and the place of each tensor that is in one."""

    stacks: tuple[Stack, ...]
    main: Stack | None
    places: dict[str, Place] = field(repr=False)


def find_layout(names: Iterable[str]) -> Layout:
    """Find the stacks; linear in the number of names. Models that are merged mostly have the same names."""
    return _find_stacks(tuple(names))


@lru_cache(maxsize=4)
def _find_stacks(names: tuple[str, ...]) -> Layout:
    numbers: dict[tuple[str, str], set[int]] = {}
    counts: dict[tuple[str, str], int] = {}
    positions: dict[str, list[tuple[tuple[str, str], int, str]]] = {}
    for name in names:
        found = positions[name] = list(_split_numbered(name))
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


def chain_depths(names: Iterable[str]) -> dict[str, float]:
    """Return the depths of tensors in chains of blocks, t ∈ [0, 1] over the whole chain.

    A UNet goes down, through the middle and up: a position is a residual network with its attention, or a sampler
    downwards. So Stable Diffusion 1 has 25, and SDXL 19, in diffusers' names as in those of single files.
    """
    chains: dict[tuple[str, int], dict[tuple[float, ...], list[str]]] = {}
    for name in names:
        parts = re.split(r"[./]", name)
        link = next((i for i, part in enumerate(parts) if part in _LINKS), None)
        if link is not None:
            chain, place = _LINKS[parts[link]]
            blocks = chains.setdefault((".".join(parts[:link]), chain), {})
            blocks.setdefault((place, *_find_position(parts[link:])), []).append(name)
    found: dict[str, float] = {}
    for blocks in chains.values():
        if len({position[0] for position in blocks}) < 2:
            continue  # an ordinary stack
        # What samples upwards (at infinity) belongs to the last network of its block.
        order = sorted(position for position in blocks if math.inf not in position)
        for position, own in blocks.items():
            found |= dict.fromkeys(own, max(0, bisect_right(order, position) - 1) / max(1, len(order) - 1))
    return found


def _find_position(parts: Sequence[str]) -> tuple[float, ...]:
    """Return where in its run of blocks a tensor stands: the number of the block, and in a UNet the part of it."""
    if parts[0] in ("conv_in", "mid_block", "middle_block") or len(parts) < 2 or not parts[1].isdigit():
        return ()
    if parts[0] not in ("down_blocks", "up_blocks") or len(parts) < 4:
        return (int(parts[1]),)
    inner = {"downsamplers": _AFTER, "upsamplers": math.inf}.get(parts[2])
    return int(parts[1]), (int(parts[3]) if parts[3].isdigit() else 0) if inner is None else inner


def _split_numbered(name: str) -> Iterable[tuple[tuple[str, str], int, str]]:
    parts = name.split(".")
    for i, part in enumerate(parts):
        digits = len(part) - len(part.rstrip("0123456789"))
        if digits:
            stem = part[:-digits]
            yield (".".join(parts[:i]), stem), int(part[-digits:]), ".".join(parts[i + 1 :])


def _is_usual(key: tuple[str, str]) -> bool:
    return not key[1] and key[0].rpartition(".")[2] in _USUAL


def is_input(name: str) -> bool:
    """Return whether a tensor outside the stacks comes before them (embeddings, stems), not after (norms, heads)."""
    return _INPUT.search(name) is not None and _OUTPUT.search(name) is None
