"""Methods that need whole models and data. Available from Python (`mg.tuning`), not in recipes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, get_args

from merganser.methods.catalogue import MethodRow, ParameterRow, show_value
from merganser.tuning.adamerging import PARTS, Wise, adamerge
from merganser.tuning.merged_grams import regmean_pp
from merganser.tuning.soups import greedy_soup

_CHOICES = {"wise": get_args(Wise), "parts": tuple(PARTS)}
#: Arguments with models, or that belong to the data.
_NOT_PARAMETERS = ("data", "score", "heads", "base")


def _row(name: str, summary: str, base: str, function: Callable[..., Any]) -> MethodRow:
    """Describe a function of `mg.tuning`; its keyword-only arguments are the parameters."""
    keywords = [p for p in inspect.signature(function).parameters.values() if p.kind == p.KEYWORD_ONLY]
    return MethodRow(
        name=name,
        summary=summary,
        base=base,
        models="1+",
        reach=f"in memory, from Python with data: mg.tuning.{function.__name__}; not in recipes",
        statistics=(),
        also=(),
        parameters=tuple(_parameter(p) for p in keywords if p.name not in _NOT_PARAMETERS),
        description=inspect.cleandoc(function.__doc__ or ""),
    )


def _parameter(argument: inspect.Parameter) -> ParameterRow:
    choices = " | ".join(_CHOICES.get(argument.name, ()))
    return ParameterRow(argument.name, show_value(argument.default), "", per_model=False, bounds=choices, aliases=())


IN_MEMORY: Mapping[str, MethodRow] = {
    row.name: row
    for row in (
        _row("adamerging", "coefficients of the task vectors learned on unlabelled data", "required", adamerge),
        _row("greedy_soup", "mean of the models that do not lower a held-out score", "none", greedy_soup),
        _row("regmean_pp", "regmean with Gram matrices of the merged network, block by block", "required", regmean_pp),
    )
}
