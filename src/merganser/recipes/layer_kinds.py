"""The kind of each layer of a stack, where the config depends on the layer's number.

Some stacks have layers of two kinds: dense and sparse MLPs, attention and state spaces, full and sliding windows.
Configs define the kinds in several ways, each a class here: it reads what a config says about one layer, and writes the
settings that say the same of the layers in another order. An order that the config cannot express is refused.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
        found = (_recognise(key, sections[0], depths[0]) for key in keys)
        self._descriptions = [each for each in found if each is not None]

    def of(self, origin: LayerOrigin) -> tuple[Any, ...]:
        """Return everything the configs say about one layer."""
        return tuple(self._read(description, origin) for description in self._descriptions)

    def edits(self, order: Sequence[LayerOrigin]) -> tuple[dict[str, Any], list[str]]:
        """Return the settings that describe the stacked layers, and the keys that cannot describe them."""
        found: dict[str, Any] = {}
        impossible: list[str] = []
        for description in self._descriptions:
            settings = description.write([self._read(description, origin) for origin in order])
            if settings is None:
                impossible += description.keys
            else:
                found |= settings
        return {key: value for key, value in found.items() if value != self._sections[0].get(key)}, impossible

    def _read(self, description: _Description, origin: LayerOrigin) -> Any:
        model, layer = origin
        return description.read(self._sections[model], self._depths[model], layer)


@dataclass(frozen=True)
class _Description(ABC):
    """How a `key` describes layers. `template` is the section of the config that is edited."""

    key: str
    template: Mapping[str, Any]

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys that take part."""
        return (self.key,)

    def setting(self, section: Mapping[str, Any]) -> Any:
        """Return the setting of a model, or else the template's."""
        return section.get(self.key, self.template[self.key])

    @abstractmethod
    def read(self, section: Mapping[str, Any], depth: int, layer: int) -> Any:
        """Return what the section of a model with so many layers says about one of them."""

    @abstractmethod
    def write(self, values: Sequence[Any]) -> dict[str, Any] | None:
        """Return the settings that say these values of the layers in order; None if none do."""


class _Entries(_Description):
    """A list or a text with one entry per layer (`layer_types`): entries move with their layers."""

    def read(self, section: Mapping[str, Any], depth: int, layer: int) -> Any:
        entries = self.setting(section)
        return entries[layer] if layer < len(entries) else None

    def write(self, values: Sequence[Any]) -> dict[str, Any]:
        return {self.key: "".join(values) if isinstance(self.template[self.key], str) else list(values)}


class _Table(_Description):
    """Settings by layer number (`per_layer_config: {"5": …}`), which move with their layers."""

    def read(self, section: Mapping[str, Any], depth: int, layer: int) -> Any:
        return self.setting(section).get(str(layer))

    def write(self, values: Sequence[Any]) -> dict[str, Any]:
        return {self.key: {str(k): value for k, value in enumerate(values) if value is not None}}


class _Numbers(_Description):
    """The numbers of the layers of one kind (`mlp_only_layers: [0, 3]`)."""

    def read(self, section: Mapping[str, Any], depth: int, layer: int) -> bool:
        return layer in self.setting(section)

    def write(self, values: Sequence[Any]) -> dict[str, Any]:
        return {self.key: [k for k, value in enumerate(values) if value]}


class _First(_Description):
    """The number of first layers of one kind (`first_k_dense_replace`), which must still come first."""

    def read(self, section: Mapping[str, Any], depth: int, layer: int) -> bool:
        return bool(layer < self.setting(section))

    def write(self, values: Sequence[Any]) -> dict[str, Any] | None:
        count, given = sum(values), self.template[self.key]
        if list(values) != [k < count for k in range(len(values))]:
            return None
        return {self.key: given if given >= count == len(values) else count}


class _Step(_Description):
    """Every n-th layer is sparse, except some (`decoder_sparse_step`, `mlp_only_layers`): written as exceptions."""

    def read(self, section: Mapping[str, Any], depth: int, layer: int) -> bool:
        return layer not in section.get(_ONLY, ()) and (layer + 1) % self.setting(section) == 0

    def write(self, values: Sequence[Any]) -> dict[str, Any]:
        return {_STEP: 1, _ONLY: [k for k, sparse in enumerate(values) if not sparse]}


class _Range(_Description):
    """The first and the last sparse layer, and their interval (`moe_layer_start_index` …)."""

    @property
    def keys(self) -> tuple[str, ...]:
        return _START, _END, _INTERVAL

    def read(self, section: Mapping[str, Any], depth: int, layer: int) -> bool:
        end = section.get(_END, -1)
        last = end if end >= 0 else depth - 1
        return bool(self.setting(section) <= layer <= last and (layer + 1) % section.get(_INTERVAL, 1) == 0)

    def write(self, values: Sequence[Any]) -> dict[str, Any] | None:
        sparse = [k for k, value in enumerate(values) if value]
        first, last = (sparse[0], sparse[-1]) if sparse else (len(values), len(values))
        for interval in (self.template.get(_INTERVAL, 1), 1):
            if sparse == [k for k in range(len(values)) if first <= k <= last and (k + 1) % interval == 0]:
                return {_START: first, _END: last, _INTERVAL: interval}
        return None


class _Period(_Description):
    """A period (`attn_layer_period` with `attn_layer_offset`), in which every layer must keep its phase."""

    def read(self, section: Mapping[str, Any], depth: int, layer: int) -> Any:
        phase = layer % self.setting(section)
        offset = section.get(self.key.replace("period", "offset"))
        return phase == offset if "period" in self.key and type(offset) is int else phase

    def write(self, values: Sequence[Any]) -> dict[str, Any] | None:
        return {} if list(values) == [self.read(self.template, 0, k) for k in range(len(values))] else None


def _recognise(key: str, section: Mapping[str, Any], depth: int) -> _Description | None:
    """Return how a key of the template's section describes layers; None if it does not."""
    kind = _find_kind(key, section, depth)
    return None if kind is None else kind(key, section)


def _find_kind(key: str, section: Mapping[str, Any], depth: int) -> type[_Description] | None:
    value = section.get(key)
    if key in (_START, _END, _INTERVAL) and type(section.get(_START)) is int:
        return _Range if key == _START else None
    if key in (_STEP, _ONLY) and section.get(_STEP, 1) > 1:
        return _Step if key == _STEP else None
    if isinstance(value, list):
        if _NUMBERS.search(key) and key not in _FLAGS and _are_numbers(value, depth):
            return _Numbers
        return _Entries if len(value) == depth and _EACH.search(key) else None
    if isinstance(value, dict):
        return _Table if value and "layer" in key and all(number.isdecimal() for number in value) else None
    if isinstance(value, str):
        return _Entries if len(value) == depth and "pattern" in key else None
    if type(value) is not int:
        return None
    slides = bool(section.get("use_sliding_window")) and "layer_types" not in section
    if key in _FIRST or (key == "max_window_layers" and slides):
        return _First
    return _Period if value > 1 and _PERIOD.search(key) and not _is_spelt_out(key, section) else None


def _is_spelt_out(key: str, section: Mapping[str, Any]) -> bool:
    """Return whether a list gives for each layer what a period gives."""
    if isinstance(section.get(_BY_DEFAULT.get(key, "")), list):
        return True
    return bool(re.search("attn|attention|window|global", key)) and "layer_types" in section


def _are_numbers(value: Sequence[Any], depth: int) -> bool:
    """Return whether a list contains layer numbers: distinct, below the depth, and not a flag per layer of two."""
    whole = all(type(each) is int and 0 <= each < depth for each in value)
    return whole and len(set(value)) == len(value)
