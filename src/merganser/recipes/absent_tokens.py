"""Rows for tokens that a model does not have, by the rule that a recipe names."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from merganser.checkpoints.row_runs import RowRun
from merganser.checkpoints.token_bytes import match_tokens, spell_bytes
from merganser.checkpoints.token_pieces import cut_into_pieces
from merganser.errors import CheckpointError, RecipeError
from merganser.recipes.schema import TokenizerOptions
from merganser.recipes.token_rows import Vocabularies

#: Rules that use the embedding of the vocabulary's source.
FITTED = ("omp", "nearest")
#: The share of the vocabulary that must be common before the other rows are fitted.
_ENOUGH = 0.01


def find_absent_rows(known: Vocabularies, model: int, missing: Sequence[str]) -> dict[str, RowRun]:
    """Return the row of each token that a model lacks, as a combination of rows of the model.

    Args:
        known: The vocabularies; the rule is that of their options.
        model: The index of the model that lacks the tokens.
        missing: The missing tokens.
    """
    options, tokens, own = known.options, known.target, known.tokens[model]
    if options.absent in FITTED:
        return dict.fromkeys(missing, RowRun(1, "fit"))
    if options.absent == "zero":
        return dict.fromkeys(missing, RowRun(1, ()))
    if options.absent == "mean":
        return dict.fromkeys(missing, RowRun(1, None))
    directory = known.table.tokenizer(model).directory
    assert directory is not None, "its tokens were read from there"
    plain = [token.encode() if token in tokens.added else spell_bytes(token, tokens.spelling) for token in missing]
    spelling = {i: token for token, i in own.ids.items()}
    found = {}
    for token, pieces in zip(missing, cut_into_pieces(directory, own, plain), strict=True):
        lengths = [len(spell_bytes(spelling[piece], own.spelling)) for piece in pieces]
        total = sum(lengths) if options.absent == "weighted_subwords" and len(pieces) > 1 else 0
        weights = tuple(length / total for length in lengths) if total else ()
        # A single piece is a token that repeats another one; its row must not be used twice.
        found[token] = RowRun(1, tuple((model, piece) for piece in pieces) if len(pieces) > 1 else None, weights)
    return found


def match_rows(known: Vocabularies, model: int) -> dict[str, int]:
    """Return a mapping from tokens of the output to the matching rows of a model; unmatched ones match by spelling."""
    tokens, own = known.target, known.tokens[model]
    found = {token: row for token, row in own.ids.items() if row < known.heights[model]}
    if own is tokens or (known.options.absent is None and own.spelling == tokens.spelling):
        return found
    equal = {t: found[o] for t, o in match_tokens(tokens, own).items() if o in found}
    return {t: row for t, row in found.items() if t not in tokens.ids} | equal


def check_absent(options: TokenizerOptions, where: str) -> None:
    """Refuse a rule that needs one source for all tokens if there is none."""
    if options.absent in FITTED and options.source == "union":
        raise RecipeError(
            f"{where}.absent: {options.absent} fits tokens in the embedding of one model, but a union has no "
            "such model; name a model as the source"
        )


def check_shared(known: Vocabularies, model: int, shared: int, total: int) -> None:
    """Refuse vocabularies that share too few tokens to fit the rest."""
    options = known.options
    needed = max(options.terms if options.absent == "omp" else 1, round(_ENOUGH * total))
    if options.absent in FITTED and shared < needed:
        raise CheckpointError(
            f"{known.where}: {known.label(model)} has {shared} of the {total} tokens of {known.label(known.source)}, "
            f"too few to fit the others ({options.absent} needs {needed}); use the rule subwords, or a source of the "
            "same script"
        )


def describe_shared(known: Vocabularies, model: int, rows: Mapping[str, int], tokens: Collection[str]) -> str:
    """Return a note on how many tokens of the output a model has itself."""
    count, rule = sum(token in rows for token in tokens), known.options.absent
    return f"{known.label(model)} has {count} of {len(tokens)} tokens; the other rows are computed by {rule}"
