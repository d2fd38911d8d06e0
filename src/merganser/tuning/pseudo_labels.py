"""Pseudo-labels: each expert's own predictions as targets, so that merges can be chosen without labelled data."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from merganser.checkpoints.opening import Reference
from merganser.checkpoints.opening import open as open_checkpoint
from merganser.errors import InputError
from merganser.modules.batches import Batch, drop_targets
from merganser.modules.functional import call, check_weights, evaluation_copy
from merganser.tuning.held_out import Data, Models, TaskHeads, label, match_data, match_heads, require_module


@torch.no_grad()
def pseudo_label(models: Models, base: Reference, data: Data, *, heads: TaskHeads | None = None) -> Data:
    """Label batches with the predictions of the expert of each task.

    The accuracy of a merge on these labels is its agreement with the experts. An expert is right more often than not,
    so a merge that disagrees with it has usually lost something. Agreement cannot show that a merge is better than an
    expert on the expert's own task.

    Args:
        models: The experts: checkpoints, state dicts or modules, in a list or by label.
        base: The module they were fine-tuned from; it is not changed.
        data: Batches for each model, in a list or by label; targets, if there are any, are ignored.
        heads: For each model, a function from the module's output to its task's logits.

    Returns:
        For each model, batches (inputs, predicted classes): `data` for `auto`, `choose_scale`, `greedy_soup` and
        `Validation`, in a list or by label as the models are.

    Raises:
        InputError: If the base is not a module, a model does not fit it, or data and models do not match.

    Example:
        >>> data = mg.tuning.pseudo_label(experts, base, {"math": batches, "code": batches})
        >>> weights, search = mg.tuning.choose_scale(experts, "tsv", base, data=data)
    """
    module = evaluation_copy(require_module(base, "base"))
    batches = match_data(data, models)
    own = match_heads(heads, models)
    found: dict[str, list[Batch]] = {}
    for name, model in label(models).items():
        weights = open_checkpoint(model).state_dict()
        check_weights(module, weights, name)
        found[name] = []
        for batch in batches[name]:
            inputs = drop_targets(module, batch)
            output = call(module, weights, inputs)
            found[name].append((inputs, (own[name](output) if own else output).argmax(-1)))
        if not found[name]:
            raise InputError(f"data of {name!r}: no batches to label")
    return found if isinstance(models, Mapping) else list(found.values())
