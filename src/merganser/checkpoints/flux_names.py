"""The two layouts of Flux: that of single files, which fuses queries, keys and values, and that of diffusers."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass

#: Modules of single files with the modules of diffusers whose rows follow one another in them.
_OUTER = {
    "img_in": ("x_embedder",),
    "txt_in": ("context_embedder",),
    "time_in.in_layer": ("time_text_embed.timestep_embedder.linear_1",),
    "time_in.out_layer": ("time_text_embed.timestep_embedder.linear_2",),
    "vector_in.in_layer": ("time_text_embed.text_embedder.linear_1",),
    "vector_in.out_layer": ("time_text_embed.text_embedder.linear_2",),
    "guidance_in.in_layer": ("time_text_embed.guidance_embedder.linear_1",),
    "guidance_in.out_layer": ("time_text_embed.guidance_embedder.linear_2",),
    "final_layer.linear": ("proj_out",),
}
_DOUBLE = {
    "img_mod.lin": ("norm1.linear",),
    "txt_mod.lin": ("norm1_context.linear",),
    "img_attn.qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "txt_attn.qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
    "img_attn.proj": ("attn.to_out.0",),
    "txt_attn.proj": ("attn.to_add_out",),
    "img_mlp.0": ("ff.net.0.proj",),
    "img_mlp.2": ("ff.net.2",),
    "txt_mlp.0": ("ff_context.net.0.proj",),
    "txt_mlp.2": ("ff_context.net.2",),
}
_SINGLE = {
    "modulation.lin": ("norm.linear",),
    "linear1": ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"),
    "linear2": ("proj_out",),
}
_BLOCKS = {"double_blocks": ("transformer_blocks", _DOUBLE), "single_blocks": ("single_transformer_blocks", _SINGLE)}
_NUMBER = re.compile(r"(double_blocks|single_blocks|transformer_blocks|single_transformer_blocks)\.(\d+)\.")


@dataclass(frozen=True)
class RowPlace:
    """Rows of a weight of a base, and the rows of the other layout's weight that they correspond to.

    Attributes:
        module: The module of the base.
        start: Its first row.
        stop: Its last row, exclusive.
        offset: The row of the other layout's weight that corresponds to `start`.
        total: The number of rows of the other layout's weight.
    """

    module: str
    start: int
    stop: int
    offset: int
    total: int


def flux_places(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[RowPlace, ...]]:
    """Return where a Flux transformer has the weights of the layout that it is not in; empty for other models.

    Args:
        shapes: The shapes of its weights by module; those of single files without `model.diffusion_model.`

    Example:
        >>> flux_places({"double_blocks.0.img_attn.qkv": (6, 2)})["transformer_blocks.0.attn.to_k"]
        (RowPlace(module='double_blocks.0.img_attn.qkv', start=2, stop=4, offset=0, total=2),)
    """
    found: dict[str, tuple[RowPlace, ...]] = {}
    for fused, parts in _modules(shapes).items():
        if fused in shapes and len(shapes[fused]) == 2:
            height, width = shapes[fused]
            sizes = [height] if len(parts) == 1 else [width, width, width, height - 3 * width][: len(parts)]
            for part, size, start in zip(parts, sizes, itertools.accumulate(sizes, initial=0), strict=False):
                found[part] = (RowPlace(fused, start, start + size, 0, size),)
        elif all(part in shapes for part in parts):
            sizes = [shapes[part][0] for part in parts]
            starts = itertools.accumulate(sizes, initial=0)
            found[fused] = tuple(
                RowPlace(part, 0, size, start, sum(sizes))
                for part, size, start in zip(parts, sizes, starts, strict=False)
            )
    return found


def _modules(names: Mapping[str, object]) -> dict[str, tuple[str, ...]]:
    numbers: dict[str, set[int]] = {}
    for name in names:
        if block := _NUMBER.match(name):
            numbers.setdefault(block[1], set()).add(int(block[2]))
    if not numbers.keys() & {*_BLOCKS, "single_transformer_blocks"}:
        return {}
    found: dict[str, tuple[str, ...]] = {**_OUTER}
    for single, (diffusers, table) in _BLOCKS.items():
        for number in sorted(numbers.get(single, set()) | numbers.get(diffusers, set())):
            found |= {
                f"{single}.{number}.{fused}": tuple(f"{diffusers}.{number}.{part}" for part in parts)
                for fused, parts in table.items()
            }
    return found
