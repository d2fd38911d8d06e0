"""The dtype of the output if the recipe does not set one and the models differ."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from merganser.checkpoints.dtypes import Element
from merganser.engine.plan import Source
from merganser.lazy import torch
from merganser.recipes.schema import Recipe
from merganser.recipes.sources import SourceTable


class Dtypes:
    """Chooses the dtype of each output: the template's, or the widest of its sources if the recipe asks for it."""

    def __init__(self, recipe: Recipe, table: SourceTable) -> None:
        self._recipe = recipe
        self._table = table
        #: For every dtype that was converted, one of its sources.
        self._other: dict[Element, tuple[Source, Element]] = {}
        #: The dtype that the template's was widened to, for the config.
        self.widened: str | None = None

    def choose(self, template: Element, sources: Sequence[Source]) -> Element:
        """Return the dtype of an output made of `sources`, and record the differences."""
        found = {self._table.checkpoints[s.model].spec(s.name).element: s for s in sources}
        if found.keys() == {template}:
            return template
        chosen = template
        if self._recipe.output.widest and not any(dtype.itemsize < 2 for dtype in found):
            chosen = Element.of(functools.reduce(torch.promote_types, [element.dtype for element in found]))
            self.widened = chosen.name if chosen != template else self.widened
        for dtype, source in found.items():
            if dtype != chosen:
                self._other.setdefault(dtype, (source, chosen))
        return chosen

    def notes(self) -> list[str]:
        """Return notes on models that are stored in another dtype than the output."""
        return [
            f"{self._table.models[source.model].label} is stored in {dtype} and the output in {chosen}, "
            f"since the recipe does not choose a dtype; set {self._recipe.places.rename('output.dtype')} to choose"
            for dtype, (source, chosen) in self._other.items()
        ]
