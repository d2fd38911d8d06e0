"""Greedy soup: average the models whose presence a held-out score does not regret."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from merganser.errors import InputError
from merganser.tuning.functional import Weights
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
    sums = {n: v.detach().to(_wide(v)).clone() for n, v in models[order[0]].items()}
    chosen, best, tried = [order[0]], alone[order[0]], {order[0]: alone[order[0]]}
    likeness = models[order[0]]
    for name in order[1:]:
        candidate = {n: total + models[name][n].to(total.dtype) for n, total in sums.items() if _averages(likeness[n])}
        tried[name] = float(score(_mean(candidate, likeness, len(chosen) + 1)))
        if tried[name] >= best:
            sums.update(candidate)
            chosen.append(name)
            best = tried[name]
    report = SoupReport(tuple(order), alone, tried, tuple(chosen), best)
    return _mean(sums, likeness, len(chosen)), report


def _check_alike(models: Mapping[str, Weights]) -> None:
    (first, likeness), *others = models.items()
    for label, state in others:
        if different := sorted(likeness.keys() ^ state.keys()):
            raise InputError(f"{different[0]!r} is in {label if different[0] in state else first} alone")
        for name, value in state.items():
            if value.shape != likeness[name].shape:
                shapes = f"{tuple(likeness[name].shape)} in {first}, {tuple(value.shape)} in {label}"
                raise InputError(f"{name!r} has shape {shapes}")


def _mean(sums: Weights, likeness: Weights, count: int) -> dict[str, Tensor]:
    return {n: (sums[n] / count).to(v.dtype) if _averages(v) else v.clone() for n, v in likeness.items()}


def _averages(value: Tensor) -> bool:
    return value.is_floating_point()


def _wide(value: Tensor) -> torch.dtype:
    return torch.promote_types(value.dtype, torch.float32) if _averages(value) else value.dtype
