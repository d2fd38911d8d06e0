"""Choose the scale α of a merged task vector by a held-out score."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from merganser.checkpoints.opening import Reference
from merganser.checkpoints.opening import open as open_checkpoint
from merganser.engine.task_vector import TaskVector
from merganser.errors import InputError
from merganser.evaluate.search import ALPHAS, ScaleSearch, scale_search
from merganser.methods.registry import lookup
from merganser.methods.registry import parameters as method_parameters
from merganser.recipes.running import merge
from merganser.tuning.held_out import Data, HeldOutScore, Models, TaskHeads, score_held_out


def choose_scale(
    models: Models,
    method: str,
    base: Reference,
    *,
    data: Data | None = None,
    score: HeldOutScore | None = None,
    heads: TaskHeads | None = None,
    alphas: Sequence[float] = ALPHAS,
    budgets: Sequence[int] | None = None,
    keep: float = 0.5,
    seed: int = 0,
    dtype: str | torch.dtype | None = None,
    **parameters: Any,
) -> tuple[dict[str, Tensor], ScaleSearch]:
    """Merge at the scale α with the best held-out score.

    Candidates are θ0 + α·τ for the task vector τ of the method at scale 1; the result is computed by the method
    at the chosen scale.

    Args:
        models: Checkpoints, state dicts or modules, in a list or by label.
        method: A merging method that has a `scale`.
        base: The model they were fine-tuned from.
        data: Labelled batches `(inputs, targets)` for each model; the score is the mean accuracy over these tasks.
        score: A function of weights instead of `data`, higher is better; with `budgets`, a function of
            weights and a budget.
        heads: For each model, a function from the module's output to its task's logits.
        alphas: The scales to choose from.
        budgets: Numbers of batches of each task, rising: all scales are scored on the first, the best `keep` of them
            on the next (successive halving). Without budgets every scale is scored on all the data.
        keep: The share of scales that reach the next budget.
        seed: The seed of random methods.
        dtype: The dtype of the result; by default that of the base.
        **parameters: The other parameters of the method.

    Returns:
        The merged weights, and a record of every score; `record.best` is the chosen α as text.

    Raises:
        InputError: If the method has no scale, a scale is given, or nothing can be scored.

    Example:
        >>> data = {"math": batches, "code": batches}
        >>> weights, search = mg.tuning.choose_scale(experts, "tsv", base, data=data, alphas=[0.5, 1.0])
        >>> search.best, search.score
    """
    if "scale" not in method_parameters(lookup(method)):
        raise InputError(f"method {method!r} has no scale to choose")
    if "scale" in parameters:
        raise InputError("the scale is either given or chosen, not both; leave out scale, or call mg.merge")
    if base is None:
        raise InputError("a scale applies to a merged task vector; give the base that the models were fine-tuned from")
    if not isinstance(alphas, Sequence | np.ndarray) or not all(isinstance(alpha, Real) for alpha in alphas):
        raise InputError(f"alphas: expected a list of numbers, got {alphas!r}")
    scored = score_held_out(models, base, data, score, heads)
    start = open_checkpoint(base)
    merged = merge(models, method, base, seed=seed, dtype="float32", **parameters)
    found = scale_search(
        start.state_dict(),
        TaskVector(merged, start).state_dict(),
        scored if budgets else lambda weights, budget: scored(weights),
        budgets=budgets or (1,),
        alphas=alphas,
        keep=keep,
    )
    return merge(models, method, base, seed=seed, dtype=dtype, scale=float(found.best), **parameters), found
