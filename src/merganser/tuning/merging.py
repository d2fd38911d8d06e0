"""`merge` with data: what methods want to know of it is computed on the way."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor, nn

from merganser.checkpoints.opening import Reference
from merganser.engine import api
from merganser.engine.task_vector import TaskVector
from merganser.errors import InputError
from merganser.methods.base import lookup
from merganser.tuning.adamerging import adamerge
from merganser.tuning.fisher import diagonal_fisher
from merganser.tuning.functional import Inputs
from merganser.tuning.gram import linear_grams
from merganser.tuning.statistics import Statistics

Data: TypeAlias = Sequence[Sequence[Inputs]] | Mapping[str, Sequence[Inputs]]
Models: TypeAlias = Sequence[Reference] | Mapping[str, Reference]

COMPUTED: Mapping[str, Callable[[nn.Module, Sequence[Inputs]], Statistics]] = {
    "fisher": lambda module, batches: diagonal_fisher(module, None, batches),
    "gram": lambda module, batches: linear_grams(module, None, batches),
}
"""How each kind of statistics is had from a module and unlabelled batches."""


def merge(
    models: Models, method: str = "linear", base: Reference | None = None, *, data: Data | None = None, **options: Any
) -> dict[str, Tensor]:
    """Merge checkpoints, state dicts or modules into a new state dict; the inputs are left as they are.

    `data` holds batches of unlabelled inputs, for each model its own (a list in their order, or a mapping by label).
    It serves `fisher` and `regmean`, which then need modules, and `adamerging`, whose base must be one (options of
    `tuning.adamerging.adamerge`). Everything else in `options` is as in `engine.api.merge`: `seed`, `dtype`,
    `overrides`, `statistics` computed before, `workers`, `memory`, `device`, `allow_nan`, the method's parameters.

    >>> merged = mg.merge([math, code], method="ties", base=base, density=0.2, weight=[0.6, 0.4])
    >>> merged = mg.merge([one, two], method="regmean", data=[batches_of_one, batches_of_two])
    """
    if method == "adamerging":
        return _adamerged(models, base, data, options)
    if data is None:
        return api.merge(models, method, base, **options)
    kinds = lookup(method).statistics
    if not kinds:
        raise InputError(f"data: method {method!r} has no use for it; fisher, regmean and adamerging have")
    modules = [_module(model, f"models[{label!r}]") for label, model in _labelled(models).items()]
    batches = list(_matched(data, models).values())
    given = options.pop("statistics", None) or {}
    computed = {
        kind: [COMPUTED[kind](module, each) for module, each in zip(modules, batches, strict=True)]
        for kind in kinds
        if kind not in given
    }
    return api.merge(models, method, base, statistics={**given, **computed}, **options)


def _adamerged(models: Models, base: Reference | None, data: Data | None, options: dict[str, Any]) -> dict[str, Tensor]:
    known = inspect.signature(adamerge).parameters
    if unknown := next((name for name in options if name not in known), None):
        raise InputError(f"adamerging takes no {unknown!r}; it is learned in memory and takes {', '.join(known)}")
    if data is None:
        raise InputError("adamerging learns from data: give batches of unlabelled inputs for each model")
    module = _module(base, "base")
    weights = module.state_dict()
    vectors = {str(label): TaskVector(model, module).state_dict() for label, model in _labelled(models).items()}
    inputs = {str(label): batches for label, batches in _matched(data, models).items()}
    return adamerge(module, weights, vectors, inputs, **options).merge(weights, vectors)


def _labelled(models: Models) -> Mapping[Any, Reference]:
    return models if isinstance(models, Mapping) else dict(enumerate(models))


def _matched(data: Data, models: Models) -> Mapping[Any, Sequence[Inputs]]:
    """The batches of every model, in the models' order."""
    labels = list(_labelled(models))
    given = data if isinstance(data, Mapping) else dict(enumerate(data))
    if isinstance(data, Mapping) != isinstance(models, Mapping) or set(given) != set(labels):
        raise InputError(f"data: expected batches for each of the models {labels}, got {list(given)}")
    return {label: given[label] for label in labels}


def _module(model: Reference | None, where: str) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise InputError(f"{where}: data can only be put through a module, got {type(model).__name__}")
    return model
