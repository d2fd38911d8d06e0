"""Greedy soup: average the models whose presence a held-out score does not regret."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from merganser.errors import InputError
from merganser.tuning.functional import Weights, combine
from merganser.tuning.result import Result


@dataclass(frozen=True)
class SoupReport(Result):
    """Models in the order tried (best alone first), their own scores, the score of each tried soup, and who stayed."""

    order: tuple[str, ...]
    alone: dict[str, float]
    tried: dict[str, float]
    chosen: tuple[str, ...]
    score: float


def greedy_soup(
    models: Mapping[str, Weights], score: Callable[[Weights], float]
) -> tuple[dict[str, Tensor], SoupReport]:
    """Add models from the best down, each if the mean with it scores no less than without; higher scores are better.

    Ties keep the order given. The mean is kept in float32 or wider and rounded once.
    """
    if not models:
        raise InputError("no models to average")
    _check_alike(models)
    alone = {name: float(score(state)) for name, state in models.items()}
    order = sorted(models, key=lambda name: -alone[name])
    chosen, best, tried = [order[0]], alone[order[0]], {order[0]: alone[order[0]]}
    for name in order[1:]:
        tried[name] = float(score(_mean([models[label] for label in (*chosen, name)])))
        if tried[name] >= best:
            chosen.append(name)
            best = tried[name]
    report = SoupReport(tuple(order), alone, tried, tuple(chosen), best)
    return _mean([models[label] for label in chosen]), report


def _mean(states: Sequence[Weights]) -> dict[str, Tensor]:
    return combine(states, [1 / len(states)] * len(states))


def _check_alike(models: Mapping[str, Weights]) -> None:
    (first, likeness), *others = models.items()
    for label, state in others:
        if different := sorted(likeness.keys() ^ state.keys()):
            raise InputError(f"{different[0]!r} is in {label if different[0] in state else first} alone")
        for name, value in state.items():
            if value.shape != likeness[name].shape:
                shapes = f"{tuple(likeness[name].shape)} in {first}, {tuple(value.shape)} in {label}"
                raise InputError(f"{name!r} has shape {shapes}")
