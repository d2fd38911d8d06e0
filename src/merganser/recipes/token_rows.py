"""Find the rows that a token of the output has in each model."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from merganser.checkpoints.row_runs import RowRun
from merganser.checkpoints.tokenizer import Tokens
from merganser.errors import RecipeError
from merganser.recipes.schema import TokenizerOptions, TokenRow
from merganser.recipes.sources import SourceTable

#: Rows that are averaged, as pairs of a model and a row in it.
Sources = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Vocabularies:
    """The vocabularies that a recipe unifies.

    Attributes:
        options: What the recipe asks for.
        where: The place of the options, for messages.
        table: The models.
        source: The index of the model that provides the output's vocabulary.
        tokens: The vocabulary of each model.
        heights: The number of embedding rows of each model.
    """

    options: TokenizerOptions
    where: str
    table: SourceTable
    source: int
    tokens: Sequence[Tokens]
    heights: Sequence[int]

    @property
    def target(self) -> Tokens:
        """Return the vocabulary of the source."""
        return self.tokens[self.source]

    def label(self, model: int) -> str:
        """Return the label of a model."""
        return self.table.models[model].label


def find_rule(row: TokenRow, token: str, known: Vocabularies) -> Sources | None:
    """Return the source that a recipe names for one token; None leaves it to the general rule."""
    where = f"{known.where}.tokens[{token!r}]"
    if row.zero:
        return ()
    if row.model is None:
        return None
    model = known.table.find_model(row.model, where)
    source = row.token if row.token is not None else token
    found = source if isinstance(source, int) else known.tokens[model].ids.get(source)
    if found is None or not 0 <= found < known.heights[model]:
        raise RecipeError(f"{where}: {known.label(model)} has no row for the token {source!r}")
    return ((model, found),)


@dataclass
class TokenRows:
    """The source of every row of the output in each model.

    Attributes:
        known: The vocabularies.
        matched: Token -> row, for each model.
        rules: The sources that the recipe names, by token.
        based: Whether the first model is the base, whose row stands in for those of models that lack a token.
        absent: The rows of the tokens that the current model lacks.
    """

    known: Vocabularies
    matched: Sequence[Mapping[str, int]]
    rules: Mapping[str, Sources | None]
    based: bool
    absent: dict[str, RowRun] = field(default_factory=dict)

    def row(self, model: int, token: str | None, row: int) -> RowRun:
        """Return the source of a row of the output in a model."""
        if token is None:
            return RowRun(1, self._choose_padding(model, row))
        own = self.matched[model].get(token)
        if own is not None and token not in self.forced:
            return RowRun(1, ((model, own),))
        rule = self.rules.get(token)
        if rule is not None:
            return RowRun(1, rule)
        if token in self.absent:
            return self.absent[token]
        holders = [(i, found) for i, each in enumerate(self.matched) if (found := each.get(token)) is not None]
        return RowRun(1, tuple(holders[:1] if self.based and holders and holders[0][0] == 0 else holders))

    @functools.cached_property
    def forced(self) -> set[str]:
        """Return the tokens whose rows the recipe names for all models, also for those that have them."""
        return {token for token, row in self.known.options.tokens.items() if row.force}

    def _choose_padding(self, model: int, row: int) -> Sources | None:
        """Return the source of a row without a token; with a rule for absent tokens, it can only be the model's own."""
        for i in (model,) if self.known.options.absent else (model, 0):
            if row < self.known.heights[i] and row not in self._named[i]:
                return ((i, row),)
        return None

    @functools.cached_property
    def _named(self) -> list[set[int]]:
        """Return the rows that tokens have, for each model."""
        return [set(each.ids.values()) for each in self.known.tokens]
