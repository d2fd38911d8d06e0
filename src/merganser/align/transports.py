"""Move a task vector to another base of the same architecture."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from math import isfinite, isnan
from typing import Any

import torch
from torch import Tensor, nn

from merganser.align.matches import Match
from merganser.align.matching import match
from merganser.align.permutations import Permutations, apply
from merganser.align.state import State, states_of
from merganser.align.symmetries import Symmetry
from merganser.checkpoints.opening import Reference
from merganser.errors import InputError
from merganser.evaluate.search import scale_search
from merganser.modules.batches import Batch, require_several, require_targets
from merganser.modules.functional import WeightsScore, run
from merganser.modules.moments import evaluating


def transport(
    finetuned: Reference,
    source: Reference,
    target: Reference,
    symmetry: Symmetry,
    *,
    scale: float | Sequence[float] = 1.0,
    score: WeightsScore | None = None,
    alignment: Match | Permutations | None = None,
    gradient_batches: Iterable[Batch] | None = None,
    loss: Callable[[Tensor, Tensor], Tensor] = nn.functional.cross_entropy,
    method: str = "weights",
    **options: Any,
) -> State:
    """Move a fine-tune to another base: θ_target + scale · π(θ_finetuned − θ_source).

    π matches the source base to the target base. Counters are the target's, and so are entries of BatchNorm's running
    variance that would become negative (`reset_batch_norm` measures them anew). With `gradient_batches` an entry of the
    moved vector counts only where its sign is that of −∇L(θ_target), the descent on a few batches of the task
    (gradient-sign masking).

    Args:
        finetuned: The fine-tuned model.
        source: The base it was fine-tuned from.
        target: The base to move it to; a module, if there are `gradient_batches`.
        symmetry: The symmetry of the architecture, from `mg.align.symmetry`.
        scale: The factor on the task vector, or several to choose from by `score`.
        score: A function of weights, higher is better. Do not score on the data you test on.
        alignment: π, if it is known.
        gradient_batches: A few labelled batches `(inputs, targets)` of the task.
        loss: The loss of outputs and targets, for `gradient_batches` and `method="ste"`.
        method: How to match the bases; see `match`. By weights, and if no `start` is given, attention heads are also
            matched by their spectra first, and the better of both matches is taken.
        **options: Further options of `match`.

    Returns:
        The moved weights.

    Raises:
        InputError: If the models do not fit the symmetry, or there are several scales and no score.

    Example:
        >>> symmetry = mg.align.symmetry(base, images)
        >>> moved = mg.align.transport(math, base, models[1], symmetry)
    """
    scales = check_scales(scale, score)
    if gradient_batches is not None and not isinstance(target, nn.Module):
        raise InputError("gradient_batches run the target: give a module, not weights")
    tuned, base, new = states_of([finetuned, source, target], symmetry)
    if alignment is None:
        options |= {"loss": loss} if method == "ste" else {}
        alignment = match_bases(target, source, symmetry, method, **options)
    permutations = alignment.permutations if isinstance(alignment, Match) else alignment
    wide = {
        name: torch.promote_types(tensor.dtype, torch.float32)
        for name, tensor in new.items()
        if tensor.is_floating_point() or tensor.is_complex()
    }
    moved = apply(symmetry, permutations, {name: tuned[name].to(t) - base[name].to(t) for name, t in wide.items()})
    if gradient_batches is not None and isinstance(target, nn.Module):
        gradient = mean_gradient(target, new, gradient_batches, loss)
        moved = {name: t * (t.sign() == -gradient[name].sign()) if name in gradient else t for name, t in moved.items()}
    moved = {name: _drop_negative_variances(name, new[name], t, scales) for name, t in moved.items()}
    best = scales[0]
    if score is not None:
        search = scale_search(new, moved, lambda weights, _: score(weights), budgets=(1,), alphas=scales)
        if isnan(search.score):
            raise InputError("the score is not a number at any scale")
        best = float(search.best)
    return {
        name: (tensor.to(wide[name]) + best * moved[name]).to(tensor.dtype) if name in wide else tensor.clone()
        for name, tensor in new.items()
    }


def match_bases(
    target: Reference, source: Reference, symmetry: Symmetry, method: str = "weights", **options: Any
) -> Match:
    """Match the source base to the target base; attention heads also by their spectra first, if no start is given."""
    found = match(target, source, symmetry, method, **options)
    heads = any(tree.children for tree in symmetry.trees.values())
    if method != "weights" or "start" in options or not heads or found.optimal:
        return found
    by_heads = match(target, source, symmetry, **options | {"start": "spectra", "tries": 1})
    return max(found, by_heads, key=lambda each: each.objective)


def mean_gradient(
    module: nn.Module, state: State, batches: Iterable[Batch], loss: Callable[[Tensor, Tensor], Tensor]
) -> State:
    """Return the gradient of the summed loss of a module with these weights; names that nothing reads are left out."""
    copy = deepcopy(module)
    copy.load_state_dict(state)
    copy.requires_grad_(True)
    seen = False
    with evaluating(copy), torch.enable_grad():
        for batch in require_several(batches, "gradient_batches"):
            inputs, targets = require_targets(batch, "gradient_batches")
            loss(run(copy, inputs), targets).backward()  # type: ignore[no-untyped-call]
            seen = True
    if not seen:
        raise InputError("gradient_batches are empty; an iterator is spent after one pass: give a list")
    named = copy.named_parameters(remove_duplicate=False)
    return {name: parameter.grad for name, parameter in named if parameter.grad is not None}


def check_scales(scale: float | Sequence[float], score: WeightsScore | None) -> list[float]:
    """Return the scales, checked: finite, and one alone if there is no score to choose by."""
    several_scales = list(scale) if isinstance(scale, Sequence) else [scale]
    if not several_scales or not all(isinstance(one, int | float) and isfinite(one) for one in several_scales):
        raise InputError(f"scale is a finite number, or several to choose from, not {scale!r}")
    if len(several_scales) > 1 and score is None:
        raise InputError(f"{len(several_scales)} scales to choose from need a score")
    return [float(one) for one in several_scales]


def _drop_negative_variances(name: str, target: Tensor, moved: Tensor, scales: Sequence[float]) -> Tensor:
    """Return a moved vector without the entries that make a variance negative at one of the scales."""
    if not name.endswith("running_var"):
        return moved
    least = torch.minimum(target + min(scales) * moved, target + max(scales) * moved)
    return moved.where(least >= 0, 0.0)
