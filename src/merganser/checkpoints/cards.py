"""The cards of models and adapters: a README for the hub with what was merged, how, and how to repeat it."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from merganser import __version__
from merganser.plain import to_yaml

_LICENCE = re.compile(r"""(license|license_name):\s*["']?([\w.+-]{1,64})["']?\s*(?:#.*)?""")
_LONGEST_HEADER = 1 << 20
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@dataclass(frozen=True)
class Lineage:
    """The origin of weights: base and models as the recipe names them, and the methods."""

    base: str | None = None
    models: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()


def render_card(
    lineage: Lineage,
    recipe: str = "",
    fingerprint: str = "",
    licence: str | None = None,
    library: str = "transformers",
) -> str:
    """Return the text of the card of a model.

    Args:
        lineage: The origin of its weights.
        recipe: Its recipe, as text.
        fingerprint: The fingerprint of recipe and sources.
        licence: The licence of the output, if it is known.
        library: The library that loads it, as the hub names it.
    """
    named = list(dict.fromkeys([lineage.base, *lineage.models] if lineage.base else lineage.models))
    bare = (re.split("[@+]", name)[0].removeprefix("hf://") for name in named)
    hub = [label for label in bare if _HUB_ID.fullmatch(label)]
    header: dict[str, Any] = {"base_model": list(dict.fromkeys(hub))} if hub else {}
    if hub and len(named) > 1:
        header["base_model_relation"] = "merge"
    if licence is not None:
        header["license"] = licence
    header |= {"library_name": library, "tags": ["merge", "merganser"]}
    lines = ["---", to_yaml(header).strip(), "---", "", "# Merged model", ""]
    made = ", ".join(map(_quote_code, lineage.methods)) or "a copy"
    lines += [f"Merged with merganser {__version__} by {made}.", ""]
    if lineage.base:
        lines += [f"Base: {_quote_code(lineage.base)}", ""]
    if lineage.models:
        lines += ["Models:", "", *(f"- {_quote_code(label)}" for label in lineage.models), ""]
    if text := recipe.strip():
        fence = "`" * max(3, 1 + _longest_run(text))
        lines += ["Recipe:", "", f"{fence}yaml", text, fence, ""]
    if fingerprint:
        lines += [f"Fingerprint of recipe and sources: `{fingerprint}`", ""]
    return "\n".join(lines)


def render_adapter_card(base: str | None, made_by: Mapping[str, Any], sources: Sequence[str]) -> str:
    """Return the text of the card of a LoRA adapter.

    Args:
        base: The model it is for, as its config names it.
        made_by: The function that made it, with its settings.
        sources: The adapters or models it was made from.
    """
    hub = base is not None and _HUB_ID.fullmatch(base) is not None
    header: dict[str, Any] = {"base_model": base, "base_model_relation": "adapter"} if hub else {}
    header |= {"library_name": "peft", "tags": ["lora", "merganser"]}
    lines = ["---", to_yaml(header).strip(), "---", "", "# LoRA adapter", ""]
    lines += [f"Made with merganser {__version__} from:", "", *(f"- {_quote_code(source)}" for source in sources), ""]
    lines += [f"For: {_quote_code(base)}", ""] if base else []
    lines += ["Settings:", "", "```yaml", to_yaml(made_by).strip(), "```", ""]
    return "\n".join(lines)


def recipe_text(recipe: str | Mapping[str, Any]) -> str:
    """Return a recipe as YAML: its original text, or its document."""
    return recipe if isinstance(recipe, str) else to_yaml(recipe)


def read_licence(directory: Path | None) -> str | None:
    """Return the licence that the card of a model names, as the hub spells it (`apache-2.0`); None if there is none.

    Reads only the front matter, line by line: anyone may have written the card.
    """
    try:
        with (directory or Path(os.devnull)).joinpath("README.md").open(encoding="utf-8") as file:
            lines = file.read(_LONGEST_HEADER).splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    if not lines or lines[0].strip() != "---":
        return None
    said = {}
    for line in itertools.takewhile(lambda line: line.strip() != "---", lines[1:]):
        if (found := _LICENCE.fullmatch(line)) is not None:
            said[found[1]] = found[2].lower()
    return said.get("license_name") if said.get("license", "other") == "other" else said["license"]


def _quote_code(text: str) -> str:
    """Return a text as inline code on one line; labels come from recipes and cannot be trusted."""
    line = "".join(letter if letter.isprintable() else " " for letter in text)
    fence = "`" * (1 + _longest_run(line))
    pad = " " if line.startswith("`") or line.endswith("`") or not line.strip() else ""
    return f"{fence}{pad}{line}{pad}{fence}"


def _longest_run(text: str) -> int:
    return max((len(run) for run in re.findall("`+", text)), default=0)
