"""The config of the output where it differs from the template's, and all other files beside the weights."""

from __future__ import annotations

import os.path
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from merganser.checkpoints.cards import Lineage
from merganser.checkpoints.chat_templates import TEMPLATES
from merganser.checkpoints.gguf_config import gguf_config
from merganser.checkpoints.json_file import read_config
from merganser.checkpoints.sidecars import (
    Edit,
    Null,
    Sidecars,
    TokenizerFiles,
    code_files,
    freeze_edits,
    has_tokenizer,
)
from merganser.checkpoints.submodules import SEPARATOR, module_weights, name_written_file, weights_stem
from merganser.checkpoints.ties import untie_config
from merganser.engine.plan import Output
from merganser.errors import RecipeError, did_you_mean, reading
from merganser.recipes.layer_settings import edit_layers, walk_sections
from merganser.recipes.outputs import OutputPlanner
from merganser.recipes.references import locate
from merganser.recipes.schema import Recipe
from merganser.recipes.sources import SourceTable, Tokenizer
from merganser.recipes.vocabularies import Unified, find_resized_rows

#: Sizes of a vocabulary: of the embedding, and of one for every layer.
_VOCABULARY = re.compile(r"vocab_size(_per_layer_input)?$")
#: Special tokens for which architectures have defaults, such as 2 for the end of a text in Llama.
_DEFAULTED = ("bos_token_id", "eos_token_id", "pad_token_id")
#: Sections of a language model inside another.
_LANGUAGE = ("text_config", "llm_config", "language_config")


def plan_sidecars(
    planner: OutputPlanner, vocabulary: Unified | None, outputs: Sequence[Output]
) -> tuple[Sidecars, list[str]]:
    """Return the sidecars of a plan and notes on them."""
    recipe, table = planner.recipe, planner.table
    nested = table.models[0].plan
    speaker = vocabulary.model if vocabulary is not None else 0
    tokenizer = table.tokenizer(speaker)
    config, notes = _edit_config(planner, vocabulary, outputs)
    generation: list[Edit] = [*nested.sidecars.generation] if nested else []
    if speaker != 0:
        config += token_edits(table, speaker)
        generation += token_edits(table, speaker, "generation_config.json")
    modules, remarks = module_files(table, outputs, tokenizer.directory)
    labels = dict.fromkeys(entry.label for part in recipe.parts for each in part.slices for entry in each.models)
    added = [*tokenizer.added, *(vocabulary.added if vocabulary is not None else ())]
    sidecars = Sidecars(
        config=freeze_edits(config),
        generation=freeze_edits(generation),
        tokenizer=TokenizerFiles(table.tokenizer_model(speaker), tuple(added)),
        chat_template=choose_chat_template(recipe, table, tokenizer),
        lineage=Lineage(
            recipe.base.label if recipe.base else None,
            tuple(labels),
            tuple(sorted({output.method for output in outputs})),
        ),
        recipe=recipe.written,
        weights=weights_stem(table.config(0)),
        modules=modules,
    )
    return sidecars, notes + remarks + note_absent_files(table, speaker, bool(config))


def note_absent_files(table: SourceTable, speaker: int, configured: bool) -> list[str]:
    """Return notes on a config or a tokenizer that the output lacks and another model has.

    Args:
        table: The models; their first gives the output its config.
        speaker: The model that gives its tokenizer.
        configured: Whether the output's config is made of something else, such as the header of a GGUF file.
    """
    notes: list[str] = []
    models = range(len(table.models))

    def note(what: str, giver: int, others: Sequence[int]) -> None:
        if others and table.checkpoints[giver].directory is not None:
            label, other = table.models[giver].label, table.models[others[0]].label
            notes.append(f"the output has no {what}, because {label} has none; copy that of {other}")

    if not configured and not table.config(0):
        note("config.json", 0, [i for i in models if table.config(i)])
    if not has_tokenizer(table.tokenizer(speaker).directory):
        note("tokenizer", speaker, [i for i in models if has_tokenizer(table.tokenizer(i).directory)])
    return notes


def _edit_config(
    planner: OutputPlanner, vocabulary: Unified | None, outputs: Sequence[Output]
) -> tuple[list[Edit], list[str]]:
    """Return the edits of the template's config, special tokens aside, and notes on them."""
    table, config = planner.table, planner.table.config(0)
    nested = table.models[0].plan
    layers, notes = edit_layers([table.config(i) for i in range(len(table))], planner.stacking.restacked)
    quantisation, remarks = quantisation_edits(config, table, outputs)
    edits: list[Edit] = [
        *(((key,), value) for key, value in gguf_config(table.checkpoints[0]).items()),
        *(nested.sidecars.config if nested else ()),
        *layers,
        *(untie_config(config) if planner.separates_head(outputs) else ()),
        *dtype_edits(config, planner.recipe.output.dtype or planner.dtypes.widened),
        *quantisation,
    ]
    notes += remarks
    if vocabulary is not None:
        edits += vocabulary_edits(config, vocabulary.before, vocabulary.rows)
    elif (rows := find_resized_rows(table)) is not None:
        edits += vocabulary_edits(config, *rows)
        notes.append(
            f"{table.models[0].label}: its adapter has {rows[1]} embedding rows, its base {rows[0]}; the tokenizer is "
            "the base's; if tokens were added, copy the adapter's tokenizer files over it"
        )
    return edits, notes


def module_files(
    table: SourceTable, outputs: Sequence[Output], speaker: Path | None
) -> tuple[tuple[str, ...], list[str]]:
    """Return the files of modules whose weights are written, and notes on files that are copied."""
    notes: list[str] = []
    home, label = table.checkpoints[0].directory, table.models[0].label
    modules = module_weights(home) if home is not None else {}
    written = tuple(folder for folder in modules if any(o.name.startswith(f"{folder}{SEPARATOR}") for o in outputs))
    notes += [
        f"{folder}{SEPARATOR}{file.name} of {label} is copied unchanged; to merge it, name the models' directories"
        for folder, file in modules.items()
        if folder not in written and not any(name.startswith(f"{folder}{SEPARATOR}") for name in table.checkpoints[0])
    ]
    if code := sorted({*code_files(home), *code_files(speaker)}):
        notes.append(
            f"Python code of {label} is copied ({', '.join(code)}): transformers runs it where the output is loaded "
            "with trust_remote_code; review it before you share or load the output"
        )
    return tuple(name_written_file(home, folder) for folder in written) if home is not None else (), notes


def token_edits(table: SourceTable, model: int, file: str = "config.json") -> list[Edit]:
    """Return edits that set special tokens (`eos_token_id` …) in a config to the ids of another model's vocabulary.

    The ids come from that model's config, or from its tokenizer. A token that neither has is removed, or null in
    config.json if it begins, ends or pads texts: without the key, transformers takes the architecture's default. The
    section of a language model inside another (`text_config`) gets them too.
    """
    home, theirs = table.checkpoints[0].directory, table.tokenizer(model).directory
    tokens = table.tokens(model)
    roles = {f"{role}_token_id": tokens.ids.get(token) for role, token in tokens.roles.items()} if tokens else {}
    donor = dict(_language_sections(table.config(model)))
    said = {key: value for section in donor.values() for key, value in section.items()} | table.config(model)
    given = {**roles, **said, **(read_config(theirs, file) if file != "config.json" else {})}
    mine = table.config(0) if file == "config.json" else read_config(home, file)
    absent = dict.fromkeys(_DEFAULTED, Null.NULL) if file == "config.json" else {}
    implied = absent if "model_type" in mine and not any(section in mine for section in _LANGUAGE) else {}
    keys: list[tuple[tuple[str, ...], str]] = [((), key) for key in {**mine, **table.config(model), **implied}]
    for path, section in _language_sections(mine):
        known = [key for key in _DEFAULTED if given.get(key) is not None]
        keys += [(path, key) for key in {**section, **dict.fromkeys(known)}]
    return [
        ([*path, key], absent.get(key) if given.get(key) is None else given[key])
        for path, key in keys
        if key.endswith("_token_id")
    ]


def _language_sections(config: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Mapping[str, Any]]]:
    """Yield the sections of language models inside another model."""
    yield from ((path, section) for path, section in walk_sections(config) if path and path[-1] in _LANGUAGE)


def dtype_edits(config: Mapping[str, Any], dtype: str | None) -> list[Edit]:
    if dtype is None or not config:
        return []
    found: list[Edit] = [
        ([*path, key], dtype)
        for path, section in walk_sections(config)
        for key in ("torch_dtype", "dtype")
        if isinstance(section.get(key), str)
    ]
    return found or [(["torch_dtype"], dtype)]


def quantisation_edits(
    config: Mapping[str, Any], table: SourceTable, outputs: Sequence[Output]
) -> tuple[list[Edit], list[str]]:
    """Return edits of the quantisation config, which is kept if the output has codes; codes are only ever copied."""
    if "quantization_config" not in config:
        return [], []
    used = {source for output in outputs for source in output.inputs}
    codes = {source.model for source in used if source.name in table.quantised(source.model)}
    if not codes:
        return [(["quantization_config"], None)], []
    plain = sorted({source.model for source in used} - codes)
    return [], [
        f"the quantization_config of {table.models[0].label} is kept, and tensors of {table.models[i].label} are "
        "copied unquantised"
        for i in plain
    ]


def vocabulary_edits(config: Mapping[str, Any], before: int, rows: int) -> list[Edit]:
    """Return edits that set the vocabulary size to `rows` wherever it was `before`; other vocabularies (of sounds)
    keep theirs. A config that does not say it gets it in the section of the language model.
    """
    known = [*walk_sections(config)]
    sizes = [([*path, key], size) for path, section in known for key, size in section.items() if _VOCABULARY.match(key)]
    found = [path for path, size in sizes if size == before]
    if not found:
        inner = next((path for path, _ in known if path and path[-1] in _LANGUAGE), ())
        found = [[*inner, "vocab_size"]]
        before = next((size for path, size in sizes if path == found[0]), before)
    return [(path, rows) for path in found] if config and rows != before else []


def choose_chat_template(recipe: Recipe, table: SourceTable, tokenizer: Tokenizer) -> str | None:
    """Return the chat template: by name, the most common one of the models, from a file, or the given text."""
    asked = recipe.output.chat_template
    if asked is None and table.donor is not None and tokenizer.chat_template is None:
        return table.tokenizer(0).chat_template  # a donor's template is used as it is
    if asked is None:
        return tokenizer.template
    if asked == "auto":
        found = [t for i in range(len(table)) if (t := table.tokenizer(i).chat_template) is not None]
        return Counter(found).most_common(1)[0][0] if found else None
    if asked in TEMPLATES:
        return TEMPLATES[asked]
    if "{" in asked:
        return asked
    file = Path(locate(asked, recipe.root))
    if os.path.isfile(file):  # unlike Path.is_file, accepts text that is too long for a path
        with reading(file, RecipeError):
            return file.read_text(encoding="utf-8")
    raise RecipeError(
        f"{recipe.places.rename('output.chat_template')}: {asked!r} is neither a template, nor a file, nor a known name"
        f"{did_you_mean(asked, ['auto', *TEMPLATES])}"
    )
