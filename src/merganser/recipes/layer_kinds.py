"""The kind of each layer of a stack, where the config depends on the layer's number.

Some stacks have layers of two kinds: dense and sparse MLPs, attention and state spaces, full and sliding windows.
Configs define the kinds in five ways, which must be rewritten when layers are restacked:

- a list (or a text) with one entry per layer, or settings by layer number (`per_layer_config: {"5": …}`): entries move
  with their layers;
- a list of layer numbers (`mlp_only_layers: [0, 3]`): renumbered;
- a number of first layers that are of one kind (`first_k_dense_replace`): recounted, if they still come first;
- a period (`attn_layer_period` with `attn_layer_offset`, `decoder_sparse_step`): kept if every layer stays in phase, or
  written as a list or a range where the config has one.

An order that the config cannot express is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from merganser.recipes.stacking import LayerOrigin

_EACH = re.compile(r"layer|block|pattern|_types?(_list)?$|heads|multipliers|window$|^intermediate_size$")
_NUMBERS = re.compile(r"layers$|idx|indices|indexes")
#: Keys with a flag per layer, although the values could be layer numbers.
_FLAGS = ("no_rope_layers",)
_FIRST = ("first_k_dense_replace", "num_dense_layers", "n_dense_layers")
_PERIOD = re.compile(
    r"(attn|attention|layer|moe|expert|window|global|sparse).*(period|interval|every|freq|step|pattern)"
)
_STEP, _ONLY = "decoder_sparse_step", "mlp_only_layers"
_START, _END, _INTERVAL = "moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval"
#: Periods that only define the default of a list -> the list.
_BY_DEFAULT = {"no_rope_layer_interval": "no_rope_layers", "interleave_moe_layer_step": "moe_layers"}


class Kinds:
    """The settings of one config section about single layers, for each model whose layers are stacked.

    `sections` are the same section of every model's config (the template's first), `depths` their numbers of layers.
    """

    def __init__(self, sections: Sequence[Mapping[str, Any]], depths: Sequence[int], keys: Sequence[str]) -> None:
        self._sections = sections
        self._depths = depths
        self._keys = [key for key in keys if self._find_rule(key) is not None]

    def of(self, origin: LayerOrigin) -> tuple[Any, ...]:
        """Return everything the configs say about one layer."""
        return tuple(self._read_value(key, origin) for key in self._keys)

    def edits(self, order: Sequence[LayerOrigin]) -> tuple[dict[str, Any], list[str]]:
        """Return the settings that describe the stacked layers, and the keys that cannot describe them."""
        found: dict[str, Any] = {}
        impossible = []
        for key in self._keys:
            rule, given = self._find_rule(key), self._sections[0][key]
            values = [self._read_value(key, origin) for origin in order]
            if rule == "each":
                found[key] = "".join(values) if isinstance(given, str) else values
            elif rule == "table":
                found[key] = {str(k): value for k, value in enumerate(values) if value is not None}
            elif rule == "numbers":
                found[key] = [k for k, value in enumerate(values) if value]
            elif rule == "first":
                count = sum(values)
                if values != [k < count for k in range(len(order))]:
                    impossible.append(key)
                found[key] = count if count < len(order) or given < count else given
            elif rule == "step":
                found |= {_STEP: 1, _ONLY: [k for k, sparse in enumerate(values) if not sparse]}
            elif rule == "range":
                chosen = self._describe_range(values)
                found |= chosen or {}
                impossible += [] if chosen is not None else [_START, _END, _INTERVAL]
            elif values != [self._read_value(key, (0, k)) for k in range(len(order))]:
                impossible.append(key)
        return {key: value for key, value in found.items() if value != self._sections[0].get(key)}, impossible

    def _describe_range(self, values: Sequence[bool]) -> dict[str, int] | None:
        """Return first and last sparse layer and their interval, if these describe which layers are sparse."""
        sparse = [k for k, value in enumerate(values) if value]
        first, last = (sparse[0], sparse[-1]) if sparse else (len(values), len(values))
        for interval in (self._sections[0].get(_INTERVAL, 1), 1):
            if sparse == [k for k in range(len(values)) if first <= k <= last and (k + 1) % interval == 0]:
                return {_START: first, _END: last, _INTERVAL: interval}
        return None

    def _find_rule(self, key: str) -> str | None:
        """Return how a key describes layers, one of the ways that `_read_value` reads, or None."""
        value, depth = self._sections[0].get(key), self._depths[0]
        if key in (_START, _END, _INTERVAL) and type(self._sections[0].get(_START)) is int:
            return "range" if key == _START else None
        if key in (_STEP, _ONLY) and self._sections[0].get(_STEP, 1) > 1:
            return "step" if key == _STEP else None
        if isinstance(value, list):
            if _NUMBERS.search(key) and key not in _FLAGS and _are_numbers(value, depth):
                return "numbers"
            return "each" if len(value) == depth and _EACH.search(key) else None
        if isinstance(value, dict):
            return "table" if value and "layer" in key and all(number.isdecimal() for number in value) else None
        if isinstance(value, str):
            return "each" if len(value) == depth and "pattern" in key else None
        if type(value) is not int:
            return None
        if key in _FIRST or (key == "max_window_layers" and self._has_sliding_windows()):
            return "first"
        return "period" if value > 1 and _PERIOD.search(key) and not self._is_spelt_out(key) else None

    def _has_sliding_windows(self) -> bool:
        return bool(self._sections[0].get("use_sliding_window")) and "layer_types" not in self._sections[0]

    def _is_spelt_out(self, key: str) -> bool:
        """Return whether a list gives for each layer what a period gives."""
        if isinstance(self._sections[0].get(_BY_DEFAULT.get(key, "")), list):
            return True
        return bool(re.search("attn|attention|window|global", key)) and "layer_types" in self._sections[0]

    def _read_value(self, key: str, origin: LayerOrigin) -> Any:
        model, layer = origin
        section, rule = self._sections[model], self._find_rule(key)
        value = section.get(key, self._sections[0][key])
        if rule == "each":
            return value[layer] if layer < len(value) else None
        if rule == "table":
            return value.get(str(layer))
        if rule == "numbers":
            return layer in value
        if rule == "first":
            return layer < value
        if rule == "step":
            return layer not in section.get(_ONLY, ()) and (layer + 1) % value == 0
        if rule == "range":
            end = section.get(_END, -1)
            last = end if end >= 0 else self._depths[model] - 1
            return value <= layer <= last and (layer + 1) % section.get(_INTERVAL, 1) == 0
        offset = section.get(key.replace("period", "offset"))
        return layer % value == offset if "period" in key and type(offset) is int else layer % value


def _are_numbers(value: Sequence[Any], depth: int) -> bool:
    """Return whether a list contains layer numbers: distinct, below the depth, and not a flag per layer of two."""
    whole = all(type(each) is int and 0 <= each < depth for each in value)
    return whole and len(set(value)) == len(value)
