"""LoRA files of diffusion models without a config: kohya, LyCORIS (LoCon, LoHa, LoKr) and diffusers.

A module is named by its path with underscores for dots after a prefix (`lora_unet_…`, `lora_te_…`), or by its path
after the name of its component (`unet.…`, `transformer.…`, `text_encoder.…`). The base decides what a name refers to.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from merganser.checkpoints.adapter_updates import (
    AdapterUpdate,
    BlocksUpdate,
    LoconUpdate,
    LohaUpdate,
    LokrUpdate,
    RowBlock,
)
from merganser.checkpoints.base import Checkpoint
from merganser.checkpoints.directory import open_file
from merganser.checkpoints.flux_names import RowPlace, flux_places
from merganser.checkpoints.unet_names import translate_names
from merganser.errors import CheckpointError

#: Names of a module's tensors, by their role here.
_PARTS = {
    r"lora_down\.weight|lora\.down\.weight|(?<=_lora\.)down\.weight|lora_A(\.default)?\.weight": "lora_A",
    r"lora_up\.weight|lora\.up\.weight|(?<=_lora\.)up\.weight|lora_B(\.default)?\.weight": "lora_B",
    r"lora_mid\.weight": "lora_mid",
    r"alpha": "alpha",
    r"(?P<own>hada_\w+|lokr_\w+)": "",
}
_PART = re.compile("|".join(rf"(?P<module{i}>.+)\.(?:{pattern})" for i, pattern in enumerate(_PARTS)))
_KINDS = list(_PARTS.values())
#: Components of a pipeline, in names with underscores and with dots; older diffusers include the processor's name.
_COMPONENT = re.compile(
    r"(?P<flat>lora_(?:unet|te\d?|transformer|prior))_|(?P<dotted>unet|transformer|text_encoder\w*)\."
)
_PROCESSOR = re.compile(r"\.processor\.(to_[qkv]|to_out)_lora$")
#: Prefixes of parts in single files of diffusion models.
_INSIDE = ("model.diffusion_model.", "diffusion_model.", "cond_stage_model.transformer.", "")


class LoraFile:
    """The updates of a LoRA file that fit a base, by the names of its weights.

    A file may have modules of other components of a pipeline; these are left out. A component of which the base has
    only some modules is refused.
    """

    def __init__(self, path: str | os.PathLike[str], base: Checkpoint) -> None:
        self.path = Path(path)
        self.config: dict[str, Any] = {}
        self.needs_peft = ""
        self.replaced: dict[str, str] = {}
        self.weights = open_file(self.path)
        self.updates: dict[str, AdapterUpdate] = {}
        #: Components without any module in the base, with their numbers of modules.
        self.elsewhere: dict[str, int] = {}
        places, fused = _find_places(base)
        components: dict[str, dict[str, dict[str, str]]] = {}
        for module, parts in self._group_modules().items():
            found = _COMPONENT.match(module)
            components.setdefault((found[0][:-1] if found else "the model"), {})[module] = parts
        blocks: dict[str, list[RowBlock]] = {}
        for component, modules in components.items():
            known = {module: places.get(_plain(module)) for module in modules}
            split = {module: fused.get(_plain(module), ()) for module, name in known.items() if name is None}
            if not any(known.values()) and not any(split.values()):
                self.elsewhere[component] = len(modules)
                continue
            for module, name in known.items():
                if name is None and not split[module]:
                    raise CheckpointError(f"{self.path}: changes {module!r}, which {base.label} does not have")
                update = self._update(module, modules[module])
                if name is not None:
                    self.updates[name] = update
                for place in split.get(module, ()):
                    block = RowBlock(place.start, place.stop, place.offset, place.total, update)
                    blocks.setdefault(place.module, []).append(block)
        for name, found_blocks in blocks.items():
            if name in self.updates:
                raise CheckpointError(f"{self.path}: changes {name!r} in two layouts, as a whole and in parts")
            self.updates[name] = BlocksUpdate(self.weights, {}, tuple(found_blocks), base.spec(name).shape[0])
        if not self.updates:
            first = next(iter(next(iter(components.values()))))
            raise CheckpointError(f"{self.path}: changes {first!r}, which {base.label} does not have")

    def trains_whole(self, name: str) -> bool:
        """Return whether a whole tensor was trained: never in such a file."""
        return False

    def _group_modules(self) -> dict[str, dict[str, str]]:
        modules: dict[str, dict[str, str]] = {}
        for name in self.weights.names():
            found = _PART.fullmatch(name)
            if found is None:
                raise CheckpointError(f"{self.path}: {name!r} is not a known tensor of a LoRA, LoCon, LoHa or LoKr")
            place = next(i for i in range(len(_KINDS)) if found[f"module{i}"])
            modules.setdefault(found[f"module{place}"], {})[_KINDS[place] or found["own"]] = name
        return modules

    def _update(self, module: str, parts: Mapping[str, str]) -> AdapterUpdate:
        tensors = {part: name for part, name in parts.items() if part != "alpha"}
        kind, needed, rank_of = _kind(tensors)
        lacking = [part for part in needed if part not in tensors]
        if lacking:
            raise CheckpointError(f"{self.path}: {module!r} has no {lacking[0]}")
        scale = 1.0
        if "alpha" in parts and rank_of is not None:
            scale = float(self.weights.read(parts["alpha"])) / self.weights.spec(tensors[rank_of]).shape[0]
        update: AdapterUpdate = kind(self.weights, tensors, scale)
        return update


def _kind(tensors: Mapping[str, str]) -> tuple[Any, tuple[str, ...], str | None]:
    """Return the class of the update, the tensors it needs, and the one whose rows are its rank."""
    if any(part.startswith("hada_") for part in tensors):
        return LohaUpdate, ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"), "hada_w1_b"
    if any(part.startswith("lokr_") for part in tensors):
        factored = [place for place in "12" if f"lokr_w{place}" not in tensors]
        needed = tuple(f"lokr_w{place}_{side}" for place in factored for side in "ab")
        return LokrUpdate, needed, f"lokr_w{factored[0]}_b" if factored else None
    return LoconUpdate, ("lora_A", "lora_B"), "lora_A"


def _find_places(base: Checkpoint) -> tuple[dict[str, str], dict[str, tuple[RowPlace, ...]]]:
    """Return the base's weights by the paths of their modules, with underscores for dots; those of a UNet by both of
    its names. Then the rows of Flux's weights by the paths of its other layout."""
    found: dict[str, str] = {}
    fused: dict[str, tuple[RowPlace, ...]] = {}
    weights = [name for name in base.names() if name.endswith(".weight")]
    for prefix in _INSIDE:
        inside = {name.removeprefix(prefix): name for name in weights if name.startswith(prefix)}
        for table in ({name: name for name in inside}, translate_names(inside)):
            for own, shown in table.items():
                found.setdefault(_flat(shown), inside[own])
        shapes = {own.removesuffix(".weight"): base.spec(name).shape for own, name in inside.items()}
        for module, places in flux_places(shapes).items():
            named = tuple(replace(place, module=inside[f"{place.module}.weight"]) for place in places)
            fused.setdefault(_flat(module), named)
    return found, fused


def _flat(name: str) -> str:
    return name.removesuffix(".weight").replace(".", "_")


def _plain(module: str) -> str:
    """Return the path of a module without its component, with underscores for dots."""
    bare = _COMPONENT.sub("", module, count=1) if _COMPONENT.match(module) else module
    bare = _PROCESSOR.sub(lambda found: f".{found[1]}" + (".0" if found[1] == "to_out" else ""), bare)
    return bare.replace(".", "_")
