"""Per-task losses of one module as functions of a flat weight vector: values, gradients, Hessian-vector products."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import grad, vjp

from merganser.errors import InputError, did_you_mean
from merganser.modules.batches import Batch, require_several, require_targets
from merganser.modules.functional import FlatWeights, LossFunction, call, evaluation_copy, plain_attention


@dataclass(frozen=True)
class TaskLosses:
    """L̄_t(θ) = (1/n_t) Σ ℓ(x, y, θ) for every task t of one module, θ one flat vector.

    A task's data is one `(inputs, targets)` batch or a list of them; batches are weighted by size, so that the mean
    does not depend on the split. The module is copied in evaluation mode and never modified.
    """

    module: nn.Module
    loss: LossFunction
    data: dict[str, tuple[Batch, ...]]
    layout: FlatWeights
    start: Tensor

    @classmethod
    def of(
        cls,
        module: nn.Module,
        loss: LossFunction,
        data: Mapping[str, Batch | Sequence[Batch]],
        *,
        base: Mapping[str, Tensor] | None = None,
    ) -> TaskLosses:
        """Return losses of `module` on `data`, starting from `base` or else the module's own weights."""
        if not data:
            raise InputError("no tasks; data must name at least one")
        copied = evaluation_copy(module, base, "base")
        layout = FlatWeights.of(copied)
        batches = {task: _batches(task, value) for task, value in data.items()}
        return cls(copied, loss, batches, layout, layout.pack(dict(copied.named_parameters())))

    @property
    def tasks(self) -> tuple[str, ...]:
        """Names of the tasks, in order."""
        return tuple(self.data)

    def samples(self, task: str) -> int:
        """Return n_t."""
        return sum(targets.shape[0] for _, targets in self._data(task))

    def value(self, task: str, theta: Tensor) -> float:
        """Return L̄_t(θ)."""
        with torch.no_grad():
            return float(sum(weight * f(theta) for weight, f in self._terms(task)))

    def gradient(self, task: str, theta: Tensor) -> Tensor:
        """Return ∇L̄_t(θ)."""
        total = torch.zeros_like(theta)
        for weight, f in self._terms(task):
            total.add_(grad(f)(theta), alpha=weight)
        return total

    def joint_gradient(self, theta: Tensor) -> Tensor:
        """Return ∇ Σ_t L̄_t(θ)."""
        return torch.stack([self.gradient(task, theta) for task in self.tasks]).sum(0)

    def hvp(self, task: str, theta: Tensor, vector: Tensor) -> Tensor:
        """Return ∇²L̄_t(θ) · vector, at the cost of a few gradients, without forming the Hessian."""
        total = torch.zeros_like(theta)
        for weight, f in self._terms(task):
            with plain_attention():
                # Forward mode would need less memory, but some operations, such as batch normalisation, lack it.
                product = vjp(grad(f), theta)[1](vector)[0]
            total.add_(product, alpha=weight)
        return total

    def _data(self, task: str) -> tuple[Batch, ...]:
        if task not in self.data:
            raise InputError(f"unknown task {task!r}{did_you_mean(task, self.data)}")
        return self.data[task]

    def _terms(self, task: str) -> list[tuple[float, Callable[[Tensor], Tensor]]]:
        count = self.samples(task)

        def term(batch: Batch) -> Callable[[Tensor], Tensor]:
            inputs, targets = batch
            return lambda theta: self.loss(call(self.module, self.layout.unpack(theta), inputs), targets)

        return [(batch[1].shape[0] / count, term(batch)) for batch in self._data(task)]


def _batches(task: str, value: Batch | Sequence[Batch]) -> tuple[Batch, ...]:
    single = isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Tensor)
    where = f"data of task {task!r}"
    batches = [value] if single else list(require_several(value, where))
    if not batches:
        raise InputError(f"task {task!r} has no data")
    return tuple(require_targets(batch, where) for batch in batches)
