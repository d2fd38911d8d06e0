"""Differences between the configs of two models that change what their weights mean."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from merganser.excerpts import list_some, shorten
from merganser.recipes.sources import SourceTable

#: Settings of training, generation and storage, and those that other checks handle.
_HARMLESS = re.compile(
    r"^_|version|dtype|dropout|initializer|init_|_init$|(^|_)std$|token|label|^output_|return_dict|auto_map|name|loss|"
    r"architectures|model_type|torchscript|gradient|pruned|task|problem|quantization|tie_word|vocab|finetuning|decay|"
    r"chunk_size_feed|jitter|num_beams|temperature|^top_[kp]$|max_length|min_length|penalty|sample|early|suppress|"
    r"use_cache|cache_|implementation|legacy|pretraining_tp|prefix|is_decoder|is_encoder|cross_attention$"
)
#: Settings of single layers and their number, which slices change.
_LAYERS = re.compile(r"(num|n)_(\w+_)?layers?$|_layers$|layers?_(\w+_)?types?$|first_k_dense|depth$")
_SIZES = re.compile(r"size|dim|heads?$|head|width|inner|ffn|experts|layers?$|n_embd|d_model|d_ff|d_kv")
_SHOWN = 6
_LONGEST = 60


def find_architecture(table: SourceTable, model: int) -> str | None:
    """Return the class or the type of a model, from its config."""
    config = table.config(model)
    named = config.get("architectures")
    found = named[0] if isinstance(named, list) and named else config.get("model_type")
    return found if isinstance(found, str) else None


def note_differences(table: SourceTable, stacked: bool) -> list[str]:
    """Return notes on models whose architecture or settings differ from the template's.

    Settings of single layers count unless layers are `stacked`, since a stacked layer keeps its settings.
    """
    found = []
    have, config = table.models[0].label, table.config(0)
    for i in range(1, len(table)):
        if i == table.donor:
            continue
        label = table.models[i].label
        if other := describe_architectures(table, i):
            found.append(f"{other}; the output uses the config of {have}")
        pairs = [pair for pair in _find_differing(config, table.config(i)) if not (stacked and _is_of_layers(pair))]
        if pairs:
            shown = [f"{key} {_shorten(theirs)} ({_shorten(ours)} in {have})" for key, ours, theirs in pairs]
            found.append(
                f"{label} has settings that change what its weights mean: {list_some(shown, _SHOWN)}; the output uses "
                f"those of {have}"
            )
    return found


def describe_architectures(table: SourceTable, model: int) -> str | None:
    """Return `b is a Qwen2ForCausalLM, a a MistralForCausalLM`, or None if the architectures agree."""
    ours, theirs = find_architecture(table, 0), find_architecture(table, model)
    if ours is None or theirs is None or ours == theirs:
        return None
    return f"{table.models[model].label} is a {theirs}, {table.models[0].label} a {ours}"


def describe_sizes(table: SourceTable, model: int) -> list[str]:
    """Return the sizes that differ: `hidden_size is 32 in b and 64 in a`."""
    have, label = table.models[0].label, table.models[model].label
    pairs = _find_differing(table.config(0), table.config(model), _SIZES)
    whole = [(key, ours, theirs) for key, ours, theirs in pairs if type(ours) is int]
    return [f"{key} is {theirs} in {label} and {ours} in {have}" for key, ours, theirs in whole[:_SHOWN]]


def _is_of_layers(pair: tuple[str, Any, Any]) -> bool:
    return isinstance(pair[1], list) or _LAYERS.search(pair[0]) is not None


def _shorten(value: Any) -> str:
    return shorten(str(value), _LONGEST, "start")


def _find_differing(
    ours: Mapping[str, Any], theirs: Mapping[str, Any], only: re.Pattern[str] | None = None
) -> Iterator[tuple[str, Any, Any]]:
    """Yield the settings that both configs have with different values; `only` restricts them by name."""
    first, second = dict(_flatten(ours)), dict(_flatten(theirs))
    for key, value in first.items():
        last = key.rpartition(".")[2]
        wanted = only.search(last) if only is not None else not _HARMLESS.search(last)
        if wanted and key in second and second[key] != value:
            yield key, value, second[key]


def _flatten(config: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the single values of a config and of its nested configs."""
    if "rope_scaling" in config or "rope_parameters" in config:
        yield f"{path}rope_type", "default"  # unless it is named
    for key, value in config.items():
        if isinstance(value, dict) and key.startswith("rope_"):
            yield from _flatten_rotary(value, path)
        elif isinstance(value, dict) and (key.endswith("config") or "model_type" in value):
            yield from _flatten(value, f"{path}{key}.")
        elif not isinstance(value, dict):
            yield f"{path}{key}", value


def _flatten_rotary(settings: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    """Yield rotary settings by their own names, wherever a version of the library puts them."""
    for key, value in settings.items():
        if isinstance(value, dict):  # those of one kind of layers
            yield from _flatten_rotary(value, f"{path}{key}.")
        elif not isinstance(value, list):
            yield f"{path}{'rope_type' if key == 'type' else key}", value
