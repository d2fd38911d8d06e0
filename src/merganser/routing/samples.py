"""Batches with a known task, with or without labels, to measure layers and settings on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from merganser.errors import InputError, did_you_mean, require_mapping
from merganser.modules.batches import require_several
from merganser.modules.inputs import Inputs

#: Batches of one task, as an `AdaptiveModel` takes them, and the classes of their samples.
Labelled = Iterable[tuple[Any, Tensor]]


def batches_by_task(
    data: Mapping[str, Iterable[Any]], tasks: Sequence[str], module: nn.Module
) -> dict[str, list[Inputs]]:
    """Return the batches of each task, at least one, without targets if they have any."""
    return {task: [Inputs.of(batch, module) for batch in parts] for task, parts in _listed(data, tasks).items()}


def labelled_by_task(data: Mapping[str, Labelled], tasks: Sequence[str]) -> dict[str, list[tuple[Inputs, Tensor]]]:
    """Return the batches of each task with a label for every sample."""
    return {task: [_pair(task, part) for part in parts] for task, parts in _listed(data, tasks).items()}


def _listed(data: Mapping[str, Iterable[Any]], tasks: Sequence[str]) -> dict[str, list[Any]]:
    if not data:
        raise InputError("no data: give some batches of every task")
    found = {}
    require_mapping("data", data)
    for task, parts in data.items():
        if task not in tasks:
            raise InputError(f"data of {task!r}, which is not an expert{did_you_mean(task, tasks)}")
        if isinstance(parts, (Tensor, Mapping, Inputs)):
            raise InputError(f"the data of {task!r} are a single batch; give a list of batches")
        found[task] = list(require_several(parts, f"the data of {task!r}"))
        if not found[task]:
            raise InputError(f"no batch of {task!r}: give at least one")
    return found


def _pair(task: str, part: Any) -> tuple[Inputs, Tensor]:
    if not isinstance(part, (tuple, list)) or len(part) != 2:
        raise InputError(f"the data of {task!r}: expected pairs of a batch and its labels")
    inputs, labels = Inputs.of(part[0]), torch.as_tensor(part[1])
    if labels.shape != (inputs.size,):
        raise InputError(f"labels of shape {list(labels.shape)} for a batch of {inputs.size} samples of {task!r}")
    return inputs, labels
