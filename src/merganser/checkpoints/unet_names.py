"""The two names of a Stable Diffusion UNet: those of single files (`input_blocks.4.1`), those of diffusers
(`down_blocks.1.attentions.0`).

Which is which follows from the number of blocks on each side and from what is in them, and both kinds of names tell.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping

#: Blocks of one side: residual networks in it, whether they have attentions, whether it ends with a sampler.
_Side = list[tuple[int, bool, bool]]
_ENDS = {
    "input_blocks.0.0": "conv_in",
    "time_embed.0": "time_embedding.linear_1",
    "time_embed.2": "time_embedding.linear_2",
    "label_emb.0.0": "add_embedding.linear_1",
    "label_emb.0.2": "add_embedding.linear_2",
    "middle_block.0": "mid_block.resnets.0",
    "middle_block.1": "mid_block.attentions.0",
    "middle_block.2": "mid_block.resnets.1",
    "out.0": "conv_norm_out",
    "out.2": "conv_out",
}
_RESNET = {
    "in_layers.0": "norm1",
    "in_layers.2": "conv1",
    "emb_layers.1": "time_emb_proj",
    "out_layers.0": "norm2",
    "out_layers.3": "conv2",
    "skip_connection": "conv_shortcut",
}
_BLOCK = re.compile(r"(down|up)_blocks\.(\d+)\.(resnets|attentions|downsamplers|upsamplers)\.(\d+)\.")


def translate_names(names: Collection[str]) -> dict[str, str]:
    """Return the names of the parameters of a UNet in the other naming; empty if the names are not those of a UNet.

    Args:
        names: The names of all its parameters, those of single files without `model.diffusion_model.`

    Example:
        >>> translate_names(["down_blocks.0.resnets.0.conv1.weight"])
        {'down_blocks.0.resnets.0.conv1.weight': 'input_blocks.1.0.in_layers.2.weight'}
    """
    single = any(name.startswith("input_blocks.") for name in names)
    if not single and not any(_BLOCK.match(name) for name in names):
        return {}
    pairs = dict(_pair_modules(*(_count_single(names) if single else _count_diffusers(names))))
    inner = _RESNET if single else _reverse(_RESNET)
    table = pairs if single else _reverse(pairs)
    found = {}
    for name in names:
        module, part = name.rpartition(".")[::2]
        head = _match_longest(module, table)
        if head:
            rest = module[len(head) + 1 :]
            found[name] = ".".join(filter(None, (table[head], inner.get(rest, rest), part)))
    return found


def _pair_modules(down: _Side, up: _Side) -> Iterator[tuple[str, str]]:
    """Yield the modules of single files with those of diffusers."""
    yield from _ENDS.items()
    number = 1
    for i, (resnets, attends, sampled) in enumerate(down):
        for j in range(resnets):
            yield f"input_blocks.{number}.0", f"down_blocks.{i}.resnets.{j}"
            if attends:
                yield f"input_blocks.{number}.1", f"down_blocks.{i}.attentions.{j}"
            number += 1
        if sampled:
            yield f"input_blocks.{number}.0.op", f"down_blocks.{i}.downsamplers.0.conv"
            number += 1
    number = 0
    for i, (resnets, attends, sampled) in enumerate(up):
        for j in range(resnets):
            yield f"output_blocks.{number}.0", f"up_blocks.{i}.resnets.{j}"
            if attends:
                yield f"output_blocks.{number}.1", f"up_blocks.{i}.attentions.{j}"
            if sampled and j == resnets - 1:
                yield f"output_blocks.{number}.{1 + attends}.conv", f"up_blocks.{i}.upsamplers.0.conv"
            number += 1


def _count_diffusers(names: Iterable[str]) -> tuple[_Side, _Side]:
    kinds: dict[tuple[str, int], dict[str, int]] = {}
    for name in names:
        if found := _BLOCK.match(name):
            block = kinds.setdefault((found[1], int(found[2])), {})
            block[found[3]] = max(block.get(found[3], 0), 1 + int(found[4]))
    down, up = (
        [
            (block.get("resnets", 0), "attentions" in block, f"{side}samplers" in block)
            for (own, _), block in sorted(kinds.items())
            if own == side
        ]
        for side in ("down", "up")
    )
    return down, up


def _count_single(names: Collection[str]) -> tuple[_Side, _Side]:
    sides: list[_Side] = []
    for word, first in (("input_blocks", 1), ("output_blocks", 0)):
        parts: dict[int, set[str]] = {}
        for name in names:
            if found := re.match(rf"{word}\.(\d+)\.(\d+)\.(\w+)", name):
                parts.setdefault(int(found[1]), set()).add(found[3])
        side: _Side = []
        resnets, attends = 0, False
        for number in sorted(parts):
            if number < first:
                continue
            has = parts[number]
            resnets, attends = resnets + ("in_layers" in has), attends or "transformer_blocks" in has
            if has & {"op", "conv"}:
                side.append((resnets, attends, True))
                resnets, attends = 0, False
        if resnets:
            side.append((resnets, attends, False))
        sides.append(side)
    return sides[0], sides[1]


def _match_longest(module: str, table: Mapping[str, str]) -> str:
    """Return the longest beginning of a module's path that a table has."""
    while module and module not in table:
        module = module.rpartition(".")[0]
    return module


def _reverse(table: Mapping[str, str]) -> dict[str, str]:
    return {value: key for key, value in table.items()}
