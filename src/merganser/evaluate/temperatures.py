"""Calibrate the probabilities of options, which models often give with too much confidence."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from merganser.errors import InputError
from merganser.evaluate.examiners import MultipleChoice

#: Bounds of log T: a model whose right options are no likelier than others would want T = ∞.
LOWEST, HIGHEST = math.log(0.05), math.log(50.0)


def fit_temperature(examiner: MultipleChoice, models: Sequence[nn.Module], items: Sequence[int]) -> float:
    """Return the temperature T with the likeliest right options, softmax(ℓ/T), over all models and items.

    The negative log-likelihood is convex in 1/T, so the temperature is unique. Fit it to the models that are merged,
    on items that are not in the test, and set `options: {temperature: T}` of the task in the run file: candidates are
    then compared by calibrated probabilities (`quiz.soft`).

    Args:
        examiner: The questions; its own temperature has no effect.
        models: Networks to ask, such as the models to merge.
        items: Numbers of questions.

    Returns:
        The temperature, between 0.05 and 50.

    Raises:
        InputError: If there is no model or no item.

    Example:
        >>> quiz = MultipleChoice("quiz.jsonl", "./base")  # doctest: +SKIP
        >>> fit_temperature(quiz, [math_model, code_model], range(100))  # doctest: +SKIP
        1.8
    """
    if not models or not len(items):
        raise InputError("fit_temperature: give at least one model and one item")
    from scipy.optimize import minimize_scalar

    asked = []
    with torch.inference_mode():
        for model in models:
            logs = examiner.option_logs(model, items)
            asked += [(each, examiner.records[item]["answer"]) for item, each in zip(items, logs, strict=True)]

    def loss(log_temperature: float) -> float:
        scale = math.exp(-log_temperature)
        return -sum(float(torch.log_softmax(scale * each, 0)[answer]) for each, answer in asked) / len(asked)

    found = minimize_scalar(loss, bounds=(LOWEST, HIGHEST), method="bounded", options={"xatol": 1e-4})
    return math.exp(float(found.x))
