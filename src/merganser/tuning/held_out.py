"""Models, data and heads by label, and the held-out score that choices are based on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from torch import nn

from merganser.checkpoints.opening import Reference
from merganser.errors import InputError
from merganser.modules.batches import Batch, InputsLike, reusable
from merganser.modules.functional import Head
from merganser.recipes.running import check_several
from merganser.tuning.validation import Validation

Batches: TypeAlias = Sequence[InputsLike | Batch]
Data: TypeAlias = Sequence[Batches] | Mapping[str, Batches]
TaskHeads: TypeAlias = Sequence[Head] | Mapping[str, Head]
Models: TypeAlias = Sequence[Reference] | Mapping[str, Reference]
HeldOutScore: TypeAlias = Callable[..., float]


def label(models: Models) -> dict[str, Reference]:
    """Return the models by label: the keys of a mapping, or positions."""
    check_several(models)
    items = models.items() if isinstance(models, Mapping) else enumerate(models)
    return {str(key): model for key, model in items}


def match(given: Data | TaskHeads, models: Models, what: str) -> dict[str, Any]:
    """Return the given values by the models' labels, in order.

    Raises:
        InputError: If they are not given for exactly these models.
    """
    labels = list(label(models))
    items = given.items() if isinstance(given, Mapping) else enumerate(given)
    found = {str(key): value for key, value in items}
    if isinstance(given, Mapping) != isinstance(models, Mapping) or set(found) != set(labels):
        raise InputError(f"{what}: expected one for each of the models {labels}, got {list(found)}")
    return {key: found[key] for key in labels}


def match_data(data: Data, models: Models) -> dict[str, Any]:
    """Return the batches of each model by label; a data loader may replace a list."""
    return {key: reusable(batches, f"data of {key}") for key, batches in match(data, models, "data").items()}


def match_heads(heads: TaskHeads | None, models: Models) -> dict[str, Any] | None:
    """Return the head of each model by label, if there are heads."""
    return None if heads is None else match(heads, models, "heads")


def require_module(model: object, where: str) -> nn.Module:
    """Return `model` if it is a module, through which data can be passed."""
    if not isinstance(model, nn.Module):
        raise InputError(f"{where}: data can only be passed through a module, got {type(model).__name__}")
    return model


def score_held_out(
    models: Models, base: Reference | None, data: Data | None, score: HeldOutScore | None, heads: TaskHeads | None
) -> HeldOutScore:
    """Return the caller's score, or the accuracy on labelled data through the first module of base and models."""
    if (data is None) == (score is None):
        raise InputError("choosing needs a held-out score: give either data, labelled batches for each model, or score")
    if score is not None:
        if heads is not None:
            raise InputError("heads are for accuracy on data; a custom score must apply its own")
        return score
    assert data is not None
    module = next((m for m in (base, *label(models).values()) if isinstance(m, nn.Module)), None)
    return Validation(
        require_module(module, "base"),
        match_data(data, models),
        match_heads(heads, models),
    )
