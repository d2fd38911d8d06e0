"""Unify the vocabularies of models, and map each model's rows to the result.

Every model's embedding and head are converted to the output's vocabulary before they are merged. The row of a token
is, in this order: the model's own; what the recipe sets for this token; what the rule for absent tokens computes.
Without such a rule it is the base's row, else the mean of the models that have the token, else zero. Rows without a
token (padding) are the model's own, else the base's, else the mean row of the model. The output never has fewer rows
than the source of its vocabulary. Tokenizers that spell tokens in different ways are compared by bytes.
"""

from __future__ import annotations

import filecmp
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from merganser.checkpoints.base import views
from merganser.checkpoints.row_runs import RowRun, join_rows
from merganser.checkpoints.token_bytes import match_tokens
from merganser.checkpoints.tokenizer import Tokens, make_added_token
from merganser.checkpoints.vocabulary import RowFit, VocabularyMap
from merganser.errors import CheckpointError, RecipeError
from merganser.excerpts import list_some
from merganser.recipes.absent_tokens import (
    FITTED,
    check_absent,
    check_shared,
    describe_shared,
    find_absent_rows,
    match_rows,
)
from merganser.recipes.mismatches import find_tied_embedding
from merganser.recipes.schema import Recipe, TokenizerOptions
from merganser.recipes.sources import SourceTable
from merganser.recipes.token_rows import TokenRows, Vocabularies, find_rule

_EMBEDDING = re.compile(
    r"(^|\.)(embed_tokens|wte|word_embeddings|embed_in|shared|tok_embeddings|embedding|embeddings)(\.weight)?$"
)
_SQUARE_HEAD = re.compile(r"(^|\.)(lm_head|embed_out|output_projection|decoder|output)\.weight$")
_POSITIONS = re.compile(r"pos|wpe|token_type")


@dataclass(frozen=True)
class Unified:
    """The output's vocabulary: `rows` of the embedding (the template's had `before`), the `model` whose
    tokenizer files are used, tokens `added` to them, and for each model the map of its rows, or None if nothing
    changes.
    """

    rows: int
    before: int
    model: int
    added: tuple[dict[str, Any], ...]
    maps: tuple[VocabularyMap | None, ...]
    notes: tuple[str, ...]


def unify(recipe: Recipe, table: SourceTable) -> Unified | None:
    """Return the vocabulary that a recipe asks for, or None if it asks for none."""
    options = recipe.output.tokenizer
    if options is None:
        return None
    where = recipe.places.rename("output.tokenizer")
    notes: list[str] = []
    check_absent(options, where)
    model = _choose_source(options, table, where)
    found = [_find_height(table, i) for i in range(len(table))]
    if options == TokenizerOptions("base") and len(set(found)) == 1 and table.tokens(0) is None:
        return None  # no embedding, so there is nothing to unify
    for named, height in zip(table.models, found, strict=True):
        if height is None:
            raise CheckpointError(f"{where}: {named.label} has no token embedding, so no vocabulary to unify")
    heights = [height or 0 for height in found]
    tokens = _read_tokens(table, heights, model, where, notes)
    for named, each, height in zip(table.models, tokens, heights, strict=True):
        _check_ids(each, height, f"{where}: {named.label}")
    known = Vocabularies(options, where, table, model, tokens, heights)
    ids, added = _number_tokens(known, notes)
    rows = max(heights[model], max(ids.values(), default=-1) + 1)
    if options.pad_to_multiple_of:
        rows += -rows % options.pad_to_multiple_of
    rules = {token: find_rule(row, token, known) for token, row in options.tokens.items()}
    matched = [match_rows(known, i) for i in range(len(table))]
    builder = TokenRows(known, matched, rules, recipe.base is not None)
    maps = [
        None
        if i == table.donor or (heights[i] == rows and tokens[i].ids == ids and not builder.forced)
        else _map_vocabulary(builder, i, ids, rows, notes)
        for i in range(len(table))
    ]
    return Unified(rows, heights[0], model, tuple(added), tuple(maps), tuple(notes))


def _map_vocabulary(
    builder: TokenRows, model: int, ids: Mapping[str, int], rows: int, notes: list[str]
) -> VocabularyMap | None:
    """Return how a model's tensors get the rows of the output; None if they have them already."""
    known, matched = builder.known, builder.matched[model]
    fit = None
    if known.options.absent is not None:
        missing = [token for token, row in ids.items() if token not in matched and builder.rules.get(token) is None]
        check_shared(known, model, len(ids.keys() & matched.keys()), len(ids))
        builder.absent = find_absent_rows(known, model, missing)
        if known.options.absent in FITTED:
            unfitted = [token for token in missing if ids[token] >= known.heights[known.source]]
            builder.absent |= dict.fromkeys(unfitted, RowRun(1, None))
        notes.append(describe_shared(known, model, matched, ids))
        fit = _fit(known, model)
    by_row = {row: token for token, row in ids.items()}
    runs = join_rows(builder.row(model, by_row.get(row), row) for row in range(rows))
    if known.heights[model] == rows and runs == (RowRun(rows, ((model, 0),)),):
        return None
    return VocabularyMap(_find_names(known.table, model), runs, fit)


def _choose_source(options: TokenizerOptions, table: SourceTable, where: str) -> int:
    """Return the model that provides the output's vocabulary: one of the merge, or one opened for it."""
    if options.source in ("base", "union"):
        return 0
    try:
        return table.find_model(options.source, where)
    except CheckpointError as error:
        if options.absent is None:
            raise RecipeError(
                f"{error}; expected base, union or a model of the merge, or a rule for absent tokens with the "
                "vocabulary of any other model"
            ) from None
    return table.add_donor(options.source, f"{where}.source")


def _fit(known: Vocabularies, model: int) -> RowFit | None:
    """Return how absent rows are fitted, if at all: embeddings in the source's embedding, heads in its head."""
    options, table, source = known.options, known.table, known.source
    if options.absent not in FITTED:
        return None
    donor = table.checkpoints[source]
    embedding = _find_embedding(table, source)
    assert embedding is not None, "its height was measured"
    head = next(
        (name for name in donor.names() if _SQUARE_HEAD.search(name) and name in _find_names(table, source)), None
    )
    tensors = {
        name: head if head is not None and name != _find_embedding(table, model) else embedding
        for name in _find_names(table, model)
        if len(table.checkpoints[model].spec(name).shape) == 2
    }
    return RowFit(str(options.absent), source, options.terms if options.absent == "omp" else 1, tensors)


def find_resized_rows(table: SourceTable) -> tuple[int, int] | None:
    """Return the rows of the template's embedding before and after its adapter, if the adapter changes their number."""
    name = _find_embedding(table, 0)
    adapted = next((view for view in views(table.checkpoints[0]) if view.adapts), None)
    if name is None or adapted is None:
        return None
    before, after = (checkpoint.spec(name).shape[0] for checkpoint in (adapted.source, adapted))
    return (before, after) if before != after else None


def _find_height(table: SourceTable, model: int) -> int | None:
    """Return the number of rows of a model's input embedding, if it has one."""
    name = _find_embedding(table, model)
    return table.checkpoints[model].spec(name).shape[0] if name is not None else None


def _find_embedding(table: SourceTable, model: int) -> str | None:
    """Return the name of a model's input embedding, if it has one."""
    checkpoint, inside = table.checkpoints[model], table.layout(model).places
    for name in checkpoint.names():
        if name not in inside and _EMBEDDING.search(name) and len(checkpoint.spec(name).shape) == 2:
            return name
    return None


def _find_names(table: SourceTable, model: int) -> dict[str, tuple[str, ...]]:
    """Return the vocabulary tensors of a model, each with its name in every model: matrices as high as its
    embedding, and their biases. A square matrix counts only by its name.
    """
    checkpoint, inside, height = table.checkpoints[model], table.layout(model).places, _find_height(table, model)
    shapes = {name: checkpoint.spec(name).shape for name in checkpoint.names() if name not in inside}
    high = {n: s for n, s in shapes.items() if s and s[0] == height and not _POSITIONS.search(n)}
    matrices = {
        n for n, s in high.items() if len(s) == 2 and (s[0] != s[1] or _EMBEDDING.search(n) or _SQUARE_HEAD.search(n))
    }

    def is_bias(name: str) -> bool:
        module, _, last = name.rpartition(".")
        weight = f"{module}.weight"
        # A head that is the tied embedding may store only its bias.
        return last == "bias" and (weight in matrices or weight not in shapes)

    found = [n for n, s in high.items() if n in matrices or (len(s) == 1 and is_bias(n))]
    return {n: tuple(n if n in c else find_tied_embedding(n, c) or n for c in table.checkpoints) for n in found}


def note_renumbered(recipe: Recipe, table: SourceTable) -> list[str]:
    """Return notes on rows that are merged by number although they belong to different tokens, and on tokens that the
    output's tokenizer does not know.
    """
    if recipe.output.tokenizer is not None:
        return []
    notes = []
    height = _find_height(table, 0)
    differing = [
        i
        for i in range(1, len(table))
        if height is not None
        and _find_height(table, i) == height
        and all(_find_files(table, i))
        and not _is_same_file(table, i)
    ]
    first, home = _read_ids(table, 0) if differing else {}, table.models[0].label
    for i in differing:
        own = _read_ids(table, i)
        if own == first:
            continue
        label, key = table.models[i].label, recipe.places.rename("output.tokenizer")
        tokens = {row: token for token, row in first.items()}
        other = sum(tokens.get(row, token) != token for token, row in own.items())
        if other:
            notes.append(
                f"{label} numbers tokens differently from {home} ({other} of them), and rows are merged by number; set "
                f"{key} to merge them by token"
            )
        if first and (added := [token for token in own if token not in first]):
            notes.append(
                f"{label} has tokens that the output, with the tokenizer of {home}, will not know: "
                f"{list_some(added, 3)}; set {key} to union to keep them"
            )
    return notes


def _read_ids(table: SourceTable, model: int) -> Mapping[str, int]:
    """Return a mapping of token to row; empty for an unreadable tokenizer, which is not needed otherwise."""
    try:
        tokens = table.tokens(model)
    except CheckpointError:
        return {}
    return tokens.ids if tokens else {}


def _read_tokens(table: SourceTable, heights: Sequence[int], source: int, where: str, notes: list[str]) -> list[Tokens]:
    """Return the tokens of every model; one without a tokenizer, unless it is the source, has those of the first."""
    base, lacks = table.tokens(0), "has no tokenizer.json, vocab.json or vocab.txt"
    found = []
    for i, model in enumerate(table.models):
        own = base if _is_same_file(table, i) else table.tokens(i)
        known = own or base
        if known is None or (own is None and i == source):
            raise CheckpointError(
                f"{where}: {model.label} {lacks} to take a vocabulary from; save its tokenizer as a fast one with "
                "transformers first"
            )
        if own is None and heights[i] != heights[0]:
            raise CheckpointError(
                f"{where}: {model.label} {lacks}, and its {heights[i]} embedding rows are not the {heights[0]} of "
                f"{table.models[0].label}"
            )
        if own is None:
            notes.append(f"{model.label} has no tokenizer; that of {table.models[0].label} is assumed")
        found.append(known)
    return found


def _check_ids(tokens: Tokens, height: int, where: str) -> None:
    """Refuse ids that cannot number rows.

    A tokenizer may have ids beyond the rows of its model, but not more of those than it has tokens.
    """
    limit = height + len(tokens.ids)
    for token, row in tokens.ids.items():
        if type(row) is not int or not 0 <= row < limit:
            raise CheckpointError(
                f"{where}: its tokenizer gives the token {token!r} the id {row!r}; expected a whole number from 0 to "
                f"{limit - 1}, since it has {len(tokens.ids)} tokens and its embedding {height} rows"
            )


def _find_files(table: SourceTable, model: int) -> list[Path | None]:
    """Return the tokenizer.json of the base and of a model, each None if there is none."""
    places = [table.tokenizer(i).directory for i in (0, model)]
    return [p / "tokenizer.json" if p is not None and (p / "tokenizer.json").is_file() else None for p in places]


def _is_same_file(table: SourceTable, model: int) -> bool:
    """Return whether a model's tokenizer.json equals the base's byte by byte, so that it need not be read."""
    base, own = _find_files(table, model)
    if base is None or own is None or table.tokenizer(0).added or table.tokenizer(model).added:
        return False
    return filecmp.cmp(base, own, shallow=False)


def _number_tokens(known: Vocabularies, notes: list[str]) -> tuple[dict[str, int], list[dict[str, Any]]]:
    """Return a mapping of token to row of the output, and the records of tokens that the source's tokenizer lacks."""
    options, target = known.options, known.target
    ids = dict(target.ids)
    following = max(ids.values(), default=-1) + 1
    wanted: dict[str, Mapping[str, Any] | None] = {}
    if options.source == "union":
        for i, each in enumerate(known.tokens):
            ordinary = 0
            matched = {} if each.spelling == target.spelling else match_tokens(each, target)
            for token, row in sorted(each.ids.items(), key=lambda item: item[1]):
                if token not in ids and token not in wanted and token not in matched and row < known.heights[i]:
                    wanted[token] = each.added.get(token)
                    ordinary += token not in each.added
            if ordinary:
                notes.append(
                    f"{ordinary} ordinary tokens only {known.label(i)} has become added tokens: the rows are "
                    f"kept, but the tokenizer of {known.label(known.source)} splits text differently"
                )
    special = {"normalized": False, "special": True}
    wanted |= {token: special for token in options.tokens if token not in ids and token not in wanted}
    if wanted and not target.extensible:
        raise CheckpointError(
            f"{known.where}: tokens can only be added to a tokenizer.json, which {known.label(known.source)} lacks; "
            "save its tokenizer as a fast one with transformers first"
        )
    added = [make_added_token(token, following + k, like) for k, (token, like) in enumerate(wanted.items())]
    return ids | {record["content"]: record["id"] for record in added}, added
