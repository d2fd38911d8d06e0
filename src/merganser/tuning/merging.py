"""`merge` with data: what methods want to know of it is computed on the way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from merganser.batches import Batch, Inputs
from merganser.checkpoints.opening import Reference
from merganser.checkpoints.opening import open as open_checkpoint
from merganser.engine import api
from merganser.engine.execute import DEFAULT_MEMORY
from merganser.engine.task_vector import TaskVector
from merganser.errors import InputError, one_of
from merganser.methods.registry import lookup
from merganser.methods.registry import parameters as method_parameters
from merganser.tuning.adamerging import adamerge
from merganser.tuning.fisher import diagonal_fisher
from merganser.tuning.functional import Weights
from merganser.tuning.gram import linear_grams
from merganser.tuning.in_memory import IN_MEMORY, PARTS
from merganser.tuning.result import Result
from merganser.tuning.search import Search, scale_search
from merganser.tuning.soups import greedy_soup
from merganser.tuning.statistics import Statistics
from merganser.tuning.validation import Head, Validation

Batches: TypeAlias = Sequence[Inputs | Batch]
Data: TypeAlias = Sequence[Batches] | Mapping[str, Batches]
Models: TypeAlias = Sequence[Reference] | Mapping[str, Reference]
Options: TypeAlias = dict[str, Any]

COMPUTED: Mapping[str, Callable[[nn.Module, Sequence[Any]], Statistics]] = {
    "fisher": lambda module, batches: diagonal_fisher(module, batches),
    "gram": lambda module, batches: linear_grams(module, batches),
}
"""How each kind of statistics is had from a module and unlabelled batches."""


def merge(
    models: Models,
    method: str = "linear",
    base: Reference | None = None,
    *,
    data: Data | None = None,
    score: Callable[..., float] | None = None,
    alphas: Sequence[float] | None = None,
    budgets: Sequence[int] | None = None,
    keep: float | None = None,
    heads: Mapping[Any, Head] | Sequence[Head] | None = None,
    on_result: Callable[[Result], None] = lambda result: None,
    seed: int = 0,
    dtype: str | torch.dtype | None = None,
    overrides: Sequence[Mapping[str, Any]] = (),
    output: Mapping[str, Any] | None = None,
    statistics: Mapping[str, Sequence[Any] | Mapping[str, Any]] | None = None,
    workers: int | None = None,
    memory: int = DEFAULT_MEMORY,
    device: str = "cpu",
    allow_nan: bool = False,
    **parameters: Any,
) -> dict[str, Tensor]:
    """Merge checkpoints, state dicts or modules into a new state dict; the inputs are left as they are.

    `data` holds batches, for each model its own (a list in their order, or a mapping by label), and needs modules to
    be put through. What it is used for is in the method:

    - `fisher` and `regmean` take statistics of each model on its unlabelled batches;
    - `adamerging` learns coefficients on them (options of `tuning.adamerging.adamerge`), of the task vectors or, with
      `parts="tsv"`, of what each of them adds to TSV-Merge;
    - `greedy_soup` averages the models that a held-out score does not regret;
    - with `alphas`, any method that has a `scale` takes the α of them with the best held-out score. `budgets` make it
      successive halving: all α on the first, the best `keep` (half) of them on the next.

    The held-out score is the mean over the models' tasks of accuracy on their labelled batches (inputs, targets), a
    budget being a number of batches of each, with `heads` as in `tuning.validation.Validation`. Or it is `score`, a
    function of weights (with `budgets`: of weights and a budget), higher being better; then no data is needed.

    `on_result` is handed the record of what was learned or chosen: `AdaMerging`, `SoupReport`, `Search`.

    `parameters` are the method's (`merganser methods NAME` lists them); one that is per model takes a number or a list
    with one number for each model. A mapping of models gives them labels, which key the randomness of methods that
    draw. `statistics` are what was computed before, by kind, one for each model: `{"fisher": [...]}` of paths, state
    dicts or `tuning.statistics.Statistics`. `overrides` and `output` say what they say in a recipe; `dtype` is that of
    the output. A base that is among the models is not counted twice.

    >>> merged = mg.merge([math, code], method="ties", base=base, density=0.2, weight=[0.6, 0.4])
    >>> merged = mg.merge([one, two], method="regmean", data=[batches_of_one, batches_of_two])
    >>> merged = mg.merge([one, two], method="tsv", base=base, data=labelled, alphas=[0.5, 1.0, 1.5])
    """
    api.check_several(models)
    if method not in IN_MEMORY:
        lookup(method, others=IN_MEMORY)
    means = api.Means(
        seed=seed,
        dtype=dtype,
        overrides=overrides,
        output=output,
        statistics=statistics,
        workers=workers,
        memory=memory,
        device=device,
        allow_nan=allow_nan,
    )
    if alphas is None and (budgets is not None or keep is not None):
        raise InputError("budgets and keep are for choosing among alphas, and there are none")
    if heads is not None and (score is not None or (alphas is None and method not in IN_MEMORY)):
        raise InputError("heads are for accuracy on data and for adamerging: nothing asks for them here")
    if alphas is not None:
        search = _Search(alphas, budgets, 0.5 if keep is None else keep, _score(models, base, data, score, heads))
        return _scaled(models, method, base, search, on_result, means, parameters)
    if method == "greedy_soup":
        return _soup(models, _score(models, base, data, score, heads), on_result, [*parameters, *means.given()])
    if score is not None:
        raise InputError(f"score: method {method!r} chooses nothing by it; greedy_soup does, and others with alphas")
    if method == "adamerging":
        return _adamerged(models, base, data, heads, on_result, means, parameters)
    if data is None:
        return api.merge(models, method, base, means, **parameters)
    kinds = lookup(method).statistics
    if not kinds:
        raise InputError(
            f"data: method {method!r} has no use for it; fisher, regmean, adamerging and greedy_soup have, and methods "
            "with a scale if you give alphas to choose it from"
        )
    modules = [_module(model, f"models[{label!r}]") for label, model in _labelled(models).items()]
    batches = list(_matched(data, models).values())
    given = statistics or {}
    computed = {
        kind: [COMPUTED[kind](module, each) for module, each in zip(modules, batches, strict=True)]
        for kind in kinds
        if kind not in given
    }
    return api.merge(models, method, base, replace(means, statistics={**given, **computed}), **parameters)


class _Search(NamedTuple):
    """Which α there are to choose from, and by what."""

    alphas: Sequence[float]
    budgets: Sequence[int] | None
    keep: float
    score: Callable[..., float]

    def best(self, base: Weights, vector: Weights) -> Search:
        """Without budgets every α is scored once."""
        score = self.score if self.budgets else lambda weights, budget: self.score(weights)
        budgets = self.budgets or (1,)
        return scale_search(base, vector, score, budgets=budgets, alphas=self.alphas, keep=self.keep)


def _adamerged(
    models: Models,
    base: Reference | None,
    data: Data | None,
    heads: Mapping[Any, Head] | Sequence[Head] | None,
    on_result: Callable[[Result], None],
    means: api.Means,
    options: Options,
) -> dict[str, Tensor]:
    known = [parameter.name for parameter in IN_MEMORY["adamerging"].parameters]
    one_of("parts", parts := options.pop("parts", "differences"), PARTS)
    if unknown := next((name for name in (*options, *means.given()) if name not in known), None):
        raise InputError(f"adamerging takes no {unknown!r}; it is learned in memory and takes {', '.join(known)}")
    if data is None:
        raise InputError("adamerging learns from data: give batches of unlabelled inputs for each model")
    module = _module(base, "base")
    weights = module.state_dict()
    differences = {str(label): TaskVector(model, module).state_dict() for label, model in _labelled(models).items()}
    inputs: dict[str, Any] = {str(label): batches for label, batches in _matched(data, models).items()}
    vectors = PARTS[parts](differences)
    learned = adamerge(module, weights, vectors, inputs, heads=_heads(heads), **options)
    on_result(learned)
    return learned.merge(weights, vectors)


def _soup(
    models: Models, score: Callable[..., float], on_result: Callable[[Result], None], given: Sequence[str]
) -> dict[str, Tensor]:
    if given:
        raise InputError(f"greedy_soup takes no {given[0]!r}: it is a mean, scored in memory")
    states = {str(label): open_checkpoint(model).state_dict() for label, model in _labelled(models).items()}
    soup, report = greedy_soup(states, score)
    on_result(report)
    return soup


def _scaled(
    models: Models,
    method: str,
    base: Reference | None,
    search: _Search,
    on_result: Callable[[Result], None],
    means: api.Means,
    options: Options,
) -> dict[str, Tensor]:
    """The merge at the best α; candidates scale one task vector, the result is what the method gives at that scale."""
    if method in IN_MEMORY or "scale" not in method_parameters(lookup(method)):
        raise InputError(f"alphas: method {method!r} has no scale to choose")
    if base is None:
        raise InputError("alphas: a scale is of the merged task vector, and without a base there is none")
    if "scale" in options:
        raise InputError("alphas: the scale is either given or chosen, not both")
    start = open_checkpoint(base)
    merged = api.merge(models, method, base, replace(means, dtype="float32"), **options)
    found = search.best(start.state_dict(), TaskVector(merged, start).state_dict())
    on_result(found)
    return api.merge(models, method, base, means, scale=float(found.best), **options)


def _score(
    models: Models,
    base: Reference | None,
    data: Data | None,
    score: Callable[..., float] | None,
    heads: Mapping[Any, Head] | Sequence[Head] | None,
) -> Callable[..., float]:
    """The caller's score, or accuracy on the data through the first module among base and models."""
    if (data is None) == (score is None):
        raise InputError("choosing needs a held-out score: either data, labelled batches for each model, or score")
    if score is not None:
        return score
    assert data is not None
    module = next((m for m in (base, *_labelled(models).values()) if isinstance(m, nn.Module)), None)
    batches: dict[str, Any] = {str(label): each for label, each in _matched(data, models).items()}
    return Validation(_module(module, "base"), batches, _heads(heads))


def _heads(heads: Mapping[Any, Head] | Sequence[Head] | None) -> dict[str, Head] | None:
    """Heads by the labels of the models, given as the data is."""
    if heads is None:
        return None
    items = heads.items() if isinstance(heads, Mapping) else enumerate(heads)
    return {str(label): head for label, head in items}


def _labelled(models: Models) -> Mapping[Any, Reference]:
    return models if isinstance(models, Mapping) else dict(enumerate(models))


def _matched(data: Data, models: Models) -> Mapping[Any, Batches]:
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
