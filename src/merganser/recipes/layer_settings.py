"""Edit the config for restacked layers: the number of layers and the kind of each."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from merganser.checkpoints.sidecars import Edit
from merganser.errors import RecipeError
from merganser.recipes.layer_kinds import Kinds
from merganser.recipes.layers import Stack
from merganser.recipes.stacking import Restacked

Config = Mapping[str, Any]
#: Models whose last layer transformers takes for one of full attention, whatever the config says.
_FULL_LAST = re.compile(r"gemma4|diffusion_gemma|embedding_gemma2")
_COUNT = re.compile(r"layer|block|depth")
#: Lists that give the kind of each layer, and so their number.
_TYPES = re.compile(r"layers?_(block_)?types?$|hybrid_override_pattern")
#: Counts of layers that are not the depth of a stack.
_NOT_COUNT = re.compile(r"interval|every|window|index|start|shared|first|dense|skip|norm|per_")


def walk_sections(config: Config, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Config]]:
    """Yield the config and the configs inside it (text_config, decoder), outermost first."""
    yield path, config
    for key, value in config.items():
        if isinstance(value, dict) and (key.endswith("config") or "model_type" in value):
            yield from walk_sections(value, (*path, key))


def edit_layers(configs: Sequence[Config], restacked: Sequence[Restacked]) -> tuple[list[Edit], list[str]]:
    """Return the edits of the first config (the template's) for the stacks, and notes on what cannot be edited.

    The count is the key whose value equals the old depth; of several configs, the one that shares a word with the
    stack's name (vision_config for vision_tower.…), or the outermost. In an encoder-decoder, keys that name neither
    half belong to the encoder: num_layers of T5, num_hidden_layers of BART.

    Raises:
        RecipeError: If the config cannot describe the kinds of the stacked layers.
    """
    edits: list[Edit] = []
    notes: list[str] = []
    for each in restacked if configs[0] else ():
        old, new = each.stack.layers, len(each.order)
        if each.unchanged:
            continue
        found = _find_section(configs[0], each.stack)
        if found is None:
            notes.append(
                f"config.json does not contain the number of layers, {old}, under {each.stack.title!r}; "
                f"set the number of layers to {new} there by hand"
            )
            continue
        path, section, keys = found
        given = _dig(configs[0], path)
        edits = [*(([*path, key], section[key]) for key in section if given.get(key) != section[key]), *edits]
        changed, impossible = read_kinds(configs, each, path).edits(each.order)
        if impossible:
            raise RecipeError(_explain_refusal(each, section, impossible))
        last = (changed.get("layer_types") or section.get("layer_types") or ["full_attention"])[-1]
        if last != "full_attention" and _FULL_LAST.search(str(section.get("model_type"))):
            raise RecipeError(
                f"slices: the last layer of the output has {last}, but a {section['model_type']} needs full_attention "
                "there; end with such a layer"
            )
        edits += [([*path, key], new) for key in keys]
        edits += [([*path, key], value) for key, value in changed.items()]
    return edits, notes


def read_kinds(configs: Sequence[Config], each: Restacked, path: tuple[str, ...] | None = None) -> Kinds:
    """Return what the configs say about single layers of a stack; `path` leads to its section."""
    if path is None:
        found = _find_section(configs[0], each.stack)
        path = found[0] if found is not None else ()
    own = [_dig(config, path) or config for config in configs]
    return Kinds(own, each.depths, _select_keys(own[0], each.stack))


def _explain_refusal(each: Restacked, section: Config, impossible: Sequence[str]) -> str:
    settings = ", ".join(f"{key}: {section[key]}" for key in impossible)
    return (
        f"slices: the config gives the kind of each layer by its number ({settings}), which cannot describe the layers "
        f"under {each.stack.title!r} in their new order; choose slices that keep each kind in its places"
    )


def _find_section(config: Config, stack: Stack) -> tuple[tuple[str, ...], Config, list[str]] | None:
    """Return where a config describes a stack: the path, the section, and the keys that count its layers, if any."""
    found = []
    for path, given in walk_sections(config):
        section = _spell_out(given)
        own = _select_keys(section, stack)
        keys = [k for k in own if type(section[k]) is int and section[k] == stack.layers and _is_count(k)]
        listed = any(_TYPES.search(k) and _length(section[k]) == stack.layers for k in own)
        if keys or listed:
            words = {word for key in path for word in key.split("_") if word != "config"}
            found.append((any(word in stack.prefix for word in words), bool(keys), path, section, keys))
    return max(found, key=lambda hit: hit[:2])[2:] if found else None


def _length(value: Any) -> int | None:
    return len(value) if isinstance(value, (list, str)) else None


def _dig(config: Config, path: Sequence[str]) -> Config:
    for key in path:
        inner = config.get(key)
        config = inner if isinstance(inner, dict) else {}
    return config


def _spell_out(section: Config) -> Config:
    """Write out the depth of T5's decoder, which defaults to the encoder's, before one of them changes."""
    unsaid = section.get("is_encoder_decoder") and section.get("num_decoder_layers") is None
    return {**section, "num_decoder_layers": section["num_layers"]} if unsaid and "num_layers" in section else section


def _select_keys(section: Config, stack: Stack) -> list[str]:
    """Return the keys that do not belong to the other half of an encoder-decoder."""
    own = next((part for part in stack.prefix.split(".") if part in ("encoder", "decoder")), None)
    if own is None:
        return list(section)
    other = "decoder" if own == "encoder" else "encoder"
    halves = section.get("is_encoder_decoder") or any(other in key and _is_count(key) for key in section)
    if own == "decoder" and halves:
        return [key for key in section if own in key and other not in key]
    return [key for key in section if other not in key]


def _is_count(key: str) -> bool:
    return bool(_COUNT.search(key)) and not _NOT_COUNT.search(key)
