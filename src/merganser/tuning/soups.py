"""Greedy soup: average the models that do not lower a held-out score."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from merganser.checkpoints.opening import Reference
from merganser.checkpoints.opening import open as open_checkpoint
from merganser.errors import InputError
from merganser.modules.functional import Weights, combine
from merganser.plain import Result
from merganser.tuning.held_out import Data, HeldOutScore, Models, TaskHeads, label, score_held_out


@dataclass(frozen=True)
class SoupReport(Result):
    """Models in the order tried (best first), their scores, the score of each tried soup, and which models were
    kept.
    """

    order: tuple[str, ...]
    alone: dict[str, float]
    tried: dict[str, float]
    chosen: tuple[str, ...]
    score: float


def greedy_soup(
    models: Models,
    *,
    data: Data | None = None,
    score: HeldOutScore | None = None,
    heads: TaskHeads | None = None,
    base: Reference | None = None,
) -> tuple[dict[str, Tensor], SoupReport]:
    """Average the models that do not lower a held-out score (greedy soup).

    Models are added from the best down, if the mean with it scores no less than without. Equal models keep their
    order, and those with a score of NaN come last. The mean is computed in float32 or wider and rounded once.

    Args:
        models: Checkpoints, state dicts or modules, in a list or by label.
        data: Labelled batches `(inputs, targets)` for each model, in a list or by label; the score is then the mean
            accuracy over these tasks.
        score: A function of weights instead of `data`; higher is better.
        heads: For each model, a function from the module's output to its task's logits.
        base: A module to evaluate the data with if none of the models is one.

    Returns:
        The weights of the soup, and a record of what was tried and chosen.

    Raises:
        InputError: If the models differ in their tensors, no score is a number, or neither or both of `data` and
            `score` are given.

    Example:
        >>> data = {"math": batches, "code": batches}
        >>> weights, report = mg.tuning.greedy_soup(experts, data=data)
        >>> report.chosen
    """
    scored = score_held_out(models, base, data, score, heads)
    states = {key: open_checkpoint(model).state_dict() for key, model in label(models).items()}
    if not states:
        raise InputError("expected at least one model to average")
    _check_alike(states)
    alone = {name: float(scored(state)) for name, state in states.items()}
    order = sorted(states, key=lambda name: (math.isnan(alone[name]), -alone[name]))
    if math.isnan(alone[order[0]]):
        raise InputError(f"no model has a score: that of {order[0]!r} is NaN, as all others")
    chosen, best, tried = [order[0]], alone[order[0]], {order[0]: alone[order[0]]}
    for name in order[1:]:
        tried[name] = float(scored(_mean([states[key] for key in (*chosen, name)])))
        if tried[name] >= best:
            chosen.append(name)
            best = tried[name]
    report = SoupReport(tuple(order), alone, tried, tuple(chosen), best)
    return _mean([states[key] for key in chosen]), report


def _mean(states: Sequence[Weights]) -> dict[str, Tensor]:
    return combine(states, [1 / len(states)] * len(states))


def _check_alike(models: Mapping[str, Weights]) -> None:
    (first, likeness), *others = models.items()
    for other, state in others:
        if different := sorted(likeness.keys() ^ state.keys()):
            raise InputError(f"{different[0]!r} is only in {other if different[0] in state else first}")
        for name, value in state.items():
            if value.shape != likeness[name].shape:
                shapes = f"{tuple(likeness[name].shape)} in {first}, {tuple(value.shape)} in {other}"
                raise InputError(f"{name!r} has shape {shapes}")
