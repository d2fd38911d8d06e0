"""Methods that are no rules for tensors: `mg.merge` makes them of whole models and data, and recipes have them not."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

from merganser.methods.catalogue import MethodRow, ParameterRow, show_value
from merganser.tuning.adamerging import Wise, adamerge
from merganser.tuning.functional import Weights
from merganser.tuning.parts import tsv_parts
from merganser.tuning.soups import greedy_soup

PARTS: Mapping[str, Callable[[Mapping[str, Weights]], Mapping[str, Weights]]] = {
    "differences": lambda vectors: vectors,
    "tsv": tsv_parts,
}
"""What AdaMerging's coefficients scale."""


def _row(name: str, summary: str, base: str, function: Callable[..., Any], *more: ParameterRow) -> MethodRow:
    """The keyword-only arguments of a function are parameters, heads aside: they go with the data."""
    own = [p for p in inspect.signature(function).parameters.values() if p.kind == p.KEYWORD_ONLY and p.name != "heads"]
    return MethodRow(
        name=name,
        summary=summary,
        base=base,
        models="1+",
        reach="in memory, by mg.merge with data; not in recipes",
        statistics=(),
        also=(),
        parameters=(*(_parameter(p.name, p.default, _CHOICES.get(p.name, ())) for p in own), *more),
        description=inspect.cleandoc(function.__doc__ or ""),
    )


def _parameter(name: str, default: Any, choices: Sequence[str], help: str = "") -> ParameterRow:
    return ParameterRow(name, show_value(default), help, per_model=False, bounds=" | ".join(choices), aliases=())


_CHOICES = {"wise": get_args(Wise)}

IN_MEMORY: Mapping[str, MethodRow] = {
    row.name: row
    for row in (
        _row(
            "adamerging",
            "coefficients of the task vectors learned on unlabelled data",
            "required",
            adamerge,
            _parameter(
                "parts", "differences", tuple(PARTS), "what is scaled: task vectors, or their parts of TSV-Merge"
            ),
        ),
        _row("greedy_soup", "mean of the models that a held-out score does not regret", "none", greedy_soup),
    )
}
