"""Files beside weights in a directory: model card, recipe, config, adapter config."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from merganser import strict_json
from merganser.report.tables import Table

_MADE = re.compile(r"^Merged with (merganser \S+) by (.+)\.$", re.MULTILINE)
_BASE = re.compile(r"^Base: `(.+)`$", re.MULTILINE)
_MODELS = re.compile(r"^- `(.+)`$", re.MULTILINE)
_RECIPE = re.compile(r"^Recipe:\n\n(`{3,})yaml\n(.*?)\n\1$", re.MULTILINE | re.DOTALL)
#: Keys of a config that describe the model.
_CONFIG = (
    *("architectures", "model_type", "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads"),
    *("num_key_value_heads", "vocab_size", "max_position_embeddings", "tie_word_embeddings", "dtype", "torch_dtype"),
)
_ADAPTER = ("base_model_name_or_path", "r", "lora_alpha", "use_rslora", "target_modules", "rank_pattern")


@dataclass(frozen=True)
class Card:
    """The model card of a merge: the program, methods, models and recipe."""

    program: str
    methods: str
    base: str | None
    models: tuple[str, ...]
    recipe: str | None

    def facts(self) -> list[str]:
        lines = [f"merged with {self.program} by {self.methods}"]
        if self.base:
            lines.append(f"base: {self.base}")
        return [*lines, *(f"model: {label}" for label in self.models)]


def read_card(directory: Path) -> Card | None:
    """Return the card of a directory, if a merge wrote it."""
    file = directory / "README.md"
    text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    made = _MADE.search(text)
    if made is None:
        return None
    recipe = _RECIPE.search(text)
    told = text[: recipe.start()] if recipe else text
    base = _BASE.search(told)
    return Card(
        program=made[1],
        methods=made[2].replace("`", ""),
        base=base[1] if base else None,
        models=tuple(_MODELS.findall(told)),
        recipe=recipe[2] if recipe else None,
    )


def read_json(file: Path) -> dict[str, Any]:
    """Return the mapping in a JSON file; empty if there is none."""
    try:
        found = strict_json.read_json(file)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def config_table(directory: Path) -> Table | None:
    """Return the entries of config.json, or of an adapter's config, that describe the model."""
    for name, keys in (("adapter_config.json", _ADAPTER), ("config.json", _CONFIG)):
        found = read_json(directory / name)
        rows = [[key, _to_plain(found[key])] for key in keys if found.get(key) not in (None, "", {}, [])]
        if rows:
            return Table(["setting", "value"], rows, name)
    return None


def files_table(directory: Path) -> Table:
    """Return every file with its size, except pages: the report may be among them."""
    files = [file for file in sorted(directory.iterdir()) if file.is_file() and file.suffix != ".html"]
    return Table(["file", "bytes"], [[file.name, file.stat().st_size] for file in files], "Files")


def _to_plain(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
