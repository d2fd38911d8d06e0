"""A batch of a model's inputs: count samples, split them, and reassemble outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from merganser.errors import InputError
from merganser.modules.batches import arguments, drop_targets, explain_input_errors


@dataclass(frozen=True)
class Inputs:
    """The arguments of a forward pass, with samples along the first axis of its tensors.

    A batch is a tensor, a tuple (or list) of the module's positional arguments, or a mapping of its keyword arguments
    (see `merganser.modules.batches`).
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, batch: Any, module: nn.Module | None = None) -> Inputs:
        """Return a batch; without its targets, if the module is given."""
        if isinstance(batch, Inputs):
            return batch
        return cls(*arguments(batch if module is None else drop_targets(module, batch)))

    @property
    def size(self) -> int:
        """Return the number of samples: the length of the first tensor."""
        first = next(_tensors((self.args, self.kwargs)), None)
        if first is None or first.dim() == 0:
            raise InputError("an input-adaptive model needs a batch: a tensor with samples along its first axis")
        if first.shape[0] == 0:
            raise InputError("the batch has 0 samples; give at least one")
        return first.shape[0]

    @property
    def mask(self) -> Tensor | None:
        """Return the `attention_mask`, if there is one."""
        found = self.kwargs.get("attention_mask")
        return found if isinstance(found, Tensor) else None

    def select(self, index: Tensor) -> Inputs:
        """Return some of the samples. Tensors of another length (a table shared by all samples) are kept."""
        size = self.size

        def pick(tensor: Tensor) -> Tensor:
            whole = tensor.dim() == 0 or tensor.shape[0] != size
            return tensor if whole else tensor[index.to(tensor.device)]

        return Inputs(map_tensors(self.args, pick), map_tensors(dict(self.kwargs), pick))

    def run(self, module: nn.Module) -> Any:
        """Return the module's output."""
        with explain_input_errors(module, self.args, self.kwargs):
            return module(*self.args, **self.kwargs)


def concatenate(batches: Sequence[Inputs]) -> Inputs:
    """Return one batch of all samples; the batches must be of one kind."""
    if len(batches) == 1:
        return batches[0]
    args = tuple(torch.cat(parts) for parts in zip(*(batch.args for batch in batches), strict=True))
    return Inputs(args, {key: torch.cat([batch.kwargs[key] for batch in batches]) for key in batches[0].kwargs})


def gather(parts: Sequence[tuple[Tensor, Any]], size: int) -> Any:
    """Assemble outputs of groups of samples, each with their indices in the batch, into the output of the whole
    batch.
    """
    if len(parts) == 1 and len(parts[0][0]) == size and bool((parts[0][0] == torch.arange(size)).all()):
        return parts[0][1]
    first = parts[0][1]
    outputs = [output for _, output in parts]
    if isinstance(first, Tensor):
        return _gather_tensors(parts, size)
    if isinstance(first, Mapping):
        content = {key: gather([(index, output[key]) for index, output in parts], size) for key in first}
        return type(first)(**content) if type(first) is not dict else content
    if isinstance(first, (tuple, list)):
        fields = [
            gather([(index, output[place]) for index, output in parts], size)
            for place in range(min(len(output) for output in outputs))
        ]
        return type(first)(*fields) if hasattr(first, "_fields") else type(first)(fields)
    if all(output is None for output in outputs):
        return None
    raise InputError(
        f"outputs of type {type(first).__name__} cannot be assembled from samples with different experts; "
        "route per batch, or make the model leave them out (use_cache=False)"
    )


def _gather_tensors(parts: Sequence[tuple[Tensor, Tensor]], size: int) -> Tensor:
    first = parts[0][1]
    for index, output in parts:
        if output.dim() == 0 or output.shape[0] != len(index) or output.shape[1:] != first.shape[1:]:
            raise InputError(
                f"an output of shape {list(output.shape)} for {len(index)} samples cannot be combined with "
                f"one of shape {list(first.shape)}; samples must be along the first axis"
            )
    whole = first.new_empty((size, *first.shape[1:]))
    for index, output in parts:
        whole[index.to(whole.device)] = output
    return whole


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (Mapping, tuple, list)):
        for value in tree.values() if isinstance(tree, Mapping) else tree:
            yield from _tensors(value)


def map_tensors(tree: Any, change: Callable[[Tensor], Any]) -> Any:
    """Return nested inputs with every tensor changed."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, Mapping):
        return {key: map_tensors(value, change) for key, value in tree.items()}
    if isinstance(tree, (tuple, list)):
        return type(tree)(map_tensors(value, change) for value in tree)
    return tree
