"""The files of a checkpoint besides its weights: config, generation config, tokenizer, model card.

A plan describes them as data (`Sidecars`). The same plan writes the same bytes: no dates, and no paths of this machine
except those in the recipe.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from merganser.checkpoints.base import Checkpoint
from merganser.checkpoints.cards import Lineage, read_licence, recipe_text, render_card
from merganser.checkpoints.json_file import read_config, read_object
from merganser.checkpoints.submodules import MODULES, PIPELINE, SEPARATOR, is_index, is_pipeline, module_weights
from merganser.checkpoints.tokenizer import extend_tokenizer
from merganser.confine import confine
from merganser.errors import CheckpointError, reading

#: The name of the recipe file beside the weights.
RECIPE_FILE = "recipe.yml"
_TOKENIZER_CODE = ("tokenization_*.py",)
_MODEL_CODE = ("configuration_*.py", "modeling_*.py")
_TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "*vocab*.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "tekken.json",
    "*.spm",  # Marian
    "*.codes",  # PhoBERT, BERTweet, FlauBERT
    "dict.txt",
    "normalizer.json",  # Whisper
    "word_*.json",  # RoCBert
    "emoji.json",
    "byte_maps.json",
    *_TOKENIZER_CODE,
)
_TEMPLATES = ("chat_template.*", "additional_chat_templates/*.jinja")
_MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "*preprocessor_config.json",
    "processor_config.json",
    "audio_tokenizer_config.json",
    MODULES,
    "sentence_*config.json",
    "config_sentence_transformers.json",
    "[0-9]_*/config.json",
)
#: All files of a diffusers pipeline except weights.
_PIPELINE_FILES = (PIPELINE, "*/*.json", "*/*.txt", "*/*.model", "*/*.jinja")


class Null(Enum):
    """The value of an edit that writes null."""

    NULL = "null"


#: The path to a value in a config, and its new value; None removes it, `Null.NULL` sets it to null.
Edit = tuple[Sequence[str], Any]


@dataclass(frozen=True)
class TokenizerFiles:
    """The `model` whose tokenizer files are used, and the records of the tokens `added` to them."""

    model: int = 0
    added: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class GGUFLayout:
    """The header of a GGUF output.

    Attributes:
        file: The GGUF file that provides the settings.
        file_type: The value of `general.file_type`.
        tensors: The shape of each tensor, and the number of its type.
    """

    file: str
    file_type: int
    tensors: Mapping[str, tuple[Sequence[int], int]]


@dataclass(frozen=True)
class Sidecars:
    """Everything in a checkpoint except its weights. Configs are those of the first model, with edits.

    Attributes:
        config: Edits to config.json.
        generation: Edits to generation_config.json.
        tokenizer: The source of the tokenizer, and the tokens added to it.
        chat_template: The text of the chat template, if it changes.
        lineage: The origin of the weights, for the card.
        recipe: The recipe as it was written: its text, or the document that a program gave.
        weights: The stem of the files of weights, before `.safetensors`.
        modules: The files of weights in folders of modules, such as "2_Dense/model.safetensors".
        fingerprint: The fingerprint of the plan and its sources, for the card.
        gguf: The header of a GGUF output.
        single: Whether only one file of weights is written, with the fingerprint in its metadata.
    """

    config: tuple[Edit, ...] = ()
    generation: tuple[Edit, ...] = ()
    tokenizer: TokenizerFiles = TokenizerFiles()
    chat_template: str | None = None
    lineage: Lineage = field(default_factory=Lineage)
    recipe: str | Mapping[str, Any] = ""
    weights: str = "model"
    modules: tuple[str, ...] = ()
    fingerprint: str = ""
    gguf: GGUFLayout | None = None
    single: bool = False


def freeze_edits(edits: Iterable[Edit]) -> tuple[Edit, ...]:
    """Return edits in the hashable form of a record."""
    return tuple((tuple(path), value) for path, value in edits)


def _find_library(directory: Path | None) -> str:
    """Return the library that loads a model, as the hub names it."""
    if directory is None:
        return "transformers"
    if is_pipeline(directory) or "_diffusers_version" in read_config(directory):
        return "diffusers"
    return "sentence-transformers" if (directory / MODULES).is_file() else "transformers"


def prepare_sidecars(sidecars: Sidecars, sources: Sequence[Checkpoint]) -> Callable[[Path], None]:
    """Return a function that writes everything but the weights; `sources` are the plan's open models.

    Files that change are read and rendered now, so that a broken one is found before any work.
    """
    template = sources[0].directory
    origin = sources[sidecars.tokenizer.model].directory
    licence = common_licence(sources)
    library = _find_library(template)
    recipe = recipe_text(sidecars.recipe)
    made = {"README.md": render_card(sidecars.lineage, recipe, sidecars.fingerprint, licence, library)}
    if sidecars.recipe:
        made[RECIPE_FILE] = recipe
    copied: dict[str, Path] = {}
    if template is not None:
        copied |= _to_copy(
            template, _PIPELINE_FILES if is_pipeline(template) else (*_MODEL_FILES, *_match_model_code(template))
        )
        made_here = {file.rpartition(SEPARATOR)[0] for file in sidecars.modules}
        copied = {name: file for name, file in copied.items() if not _is_written_index(name, made_here)}
        for folder, file in module_weights(template).items():
            if folder not in made_here:
                copied |= _to_copy(template, (f"{folder}/{file.name if file.suffix != '.json' else '*'}",))
        for name, edits in (("config.json", sidecars.config), ("generation_config.json", sidecars.generation)):
            there = (template / name).is_file()
            if edits and (there or any(path == ("model_type",) for path, _ in edits)):
                made[name] = _render(apply_edits(read_object(template / name) if there else {}, edits))
    if origin is not None:
        patterns = _TOKENIZER_FILES if sidecars.chat_template is not None else (*_TOKENIZER_FILES, *_TEMPLATES)
        copied |= _to_copy(origin, patterns)
        made |= _change_tokenizer(origin, sidecars.tokenizer.added, sidecars.chat_template)

    def write(directory: Path) -> None:
        for name, file in copied.items():
            (directory / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(file, directory / name)
        for name, text in made.items():
            (directory / name).write_text(text, encoding="utf-8", newline="\n")

    return write


def common_licence(sources: Sequence[Checkpoint]) -> str | None:
    """Return the licence of all models that weights are read from, if they agree; None if one has none."""
    homes = {file.parent for source in sources for file in source.files()}
    licences = {read_licence(home) for home in homes}
    return licences.pop() if len(licences) == 1 else None


def _is_written_index(name: str, folders: Set[str]) -> bool:
    """Return whether a file is the index of weights that are written again, in one file."""
    return is_index(name) and name.partition(SEPARATOR)[0] in folders


def apply_edits(config: dict[str, Any], edits: Sequence[Edit]) -> dict[str, Any]:
    """Return a copy with the values at the given paths replaced, or removed if the new value is None."""
    result = copy.deepcopy(config)
    for path, value in edits:
        inner = result
        for key in path[:-1]:
            inner = inner.setdefault(key, {})
        if value is None:
            inner.pop(path[-1], None)
        else:
            inner[path[-1]] = None if value is Null.NULL else value
    return result


def _render(data: Mapping[str, Any]) -> str:
    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"


def has_tokenizer(directory: Path | None) -> bool:
    """Return whether a directory has any file of a tokenizer."""
    return directory is not None and bool(_to_copy(directory, _TOKENIZER_FILES))


def code_files(directory: Path | None) -> list[str]:
    """Return the files with Python code that are copied with a model."""
    return [] if directory is None else sorted(_to_copy(directory, (*_match_model_code(directory), *_TOKENIZER_CODE)))


def _match_model_code(directory: Path) -> tuple[str, ...]:
    """Return patterns of a model's Python files: all of them where its config names some, which may import others."""
    return ("*.py",) if "auto_map" in read_config(directory) else _MODEL_CODE


def _to_copy(origin: Path, patterns: Sequence[str]) -> dict[str, Path]:
    """Return the files that match these patterns, by name; links to the outside are not followed."""
    names = (file.relative_to(origin) for pattern in patterns for file in sorted(origin.glob(pattern)))
    found = {str(name): confine(origin, str(name), str(origin)) for name in names}
    return {name: file for name, file in found.items() if file.is_file()}


def _change_tokenizer(origin: Path, added: Sequence[Mapping[str, Any]], template: str | None) -> dict[str, str]:
    """Return the files of a tokenizer with tokens or a chat template added.

    The template is written only to tokenizer_config.json, where every version of transformers finds it.
    """
    made = {}
    changes: dict[str, Any] = {}
    file = origin / "tokenizer_config.json"
    settings = read_object(file) if (added or template is not None) and file.is_file() else {}
    if added:
        made["tokenizer.json"] = _render(extend_tokenizer(read_object(origin / "tokenizer.json"), added))
        if "added_tokens_decoder" in settings:
            if not isinstance(known := settings["added_tokens_decoder"], dict):
                raise CheckpointError(f"{file}: added_tokens_decoder: expected a JSON object")
            records = {str(r["id"]): {k: v for k, v in r.items() if k != "id"} for r in added}
            changes["added_tokens_decoder"] = known | records
    if template is not None:
        changes["chat_template"] = template
    if changes:
        made[file.name] = _render(settings | changes)
    return made


def read_chat_template(directory: Path | None) -> str | None:
    """Return the default chat template in a model directory."""
    if directory is None:
        return None
    if (directory / "chat_template.jinja").is_file():
        confine(directory, "chat_template.jinja", str(directory))
        with reading(directory / "chat_template.jinja", CheckpointError):
            return (directory / "chat_template.jinja").read_text(encoding="utf-8")
    file = directory / "tokenizer_config.json"
    if not file.is_file():
        return None
    template = read_object(confine(directory, file.name, str(directory))).get("chat_template")
    if isinstance(template, list):  # several templates, by name
        named = [each for each in template if isinstance(each, dict)]
        template = next((each.get("template") for each in named if each.get("name") == "default"), None)
    return template if isinstance(template, str) else None
