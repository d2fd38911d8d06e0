"""Weight disentanglement: whether adding another task's vector leaves this task's predictions unchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

from merganser.analysis.tangent import tangent
from merganser.errors import InputError, one_of
from merganser.modules.batches import InputsLike
from merganser.modules.functional import Weights, call, check_state, check_weights, evaluation_copy
from merganser.plain import Result, float_rows

Distance: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""From two outputs [N, …] to N distances."""
OutputsAt: TypeAlias = Callable[[float, float], Tensor]


@dataclass(frozen=True)
class Disentanglement(Result):
    """ξ(α₁, α₂) on a grid: `error[i][j]` at `first[i]`, `second[j]`, with its two summands in `per_task`."""

    first: tuple[float, ...]
    second: tuple[float, ...]
    error: tuple[tuple[float, ...], ...]
    per_task: tuple[tuple[tuple[float, ...], ...], tuple[tuple[float, ...], ...]]
    linearised: bool

    @property
    def mean(self) -> float:
        """Return the mean of ξ over the grid."""
        return sum(map(sum, self.error)) / (len(self.first) * len(self.second))


def disentanglement(
    module: nn.Module,
    base: Weights,
    task_vectors: tuple[Weights, Weights],
    inputs: tuple[Iterable[InputsLike], Iterable[InputsLike]],
    *,
    first: Sequence[float],
    second: Sequence[float] | None = None,
    distance: Literal["disagreement", "euclidean"] | Distance = "disagreement",
    heads: tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]] | None = None,
    linearised: bool = False,
) -> Disentanglement:
    """Return ξ(α₁, α₂) = Σ_t E_{x∼μ_t} dist(f(x; θ0 + α_t τ_t), f(x; θ0 + α₁τ₁ + α₂τ₂)) on a grid.

    Args:
        module: The network; it is not changed.
        base: The weights θ0.
        task_vectors: The task vectors τ₁ and τ₂.
        inputs: Unlabelled batches of either task; each is read once.
        first: The scales α₁.
        second: The scales α₂; by default those of `first`.
        distance: `"disagreement"` of the classes, `"euclidean"`, or a function from two outputs to a distance per
            sample.
        heads: For either task, a function from the module's output to its logits.
        linearised: Use the tangent model, at the cost of two Jacobian-vector products per batch for any grid.
    """
    if isinstance(distance, str):
        one_of("distance", distance, _DISTANCES)
    copied = evaluation_copy(module)
    check_state(copied, base, "base")
    for index, vector in enumerate(task_vectors):
        check_weights(copied, vector, f"task vector {index}")
    second = first if second is None else second
    if not first or not second:
        raise InputError("a grid needs at least one scale of each task vector")
    measure = _DISTANCES[distance] if isinstance(distance, str) else distance
    totals = torch.zeros(2, len(first), len(second), dtype=torch.float64)
    with torch.no_grad():
        for task, batches in enumerate(inputs):
            head = heads[task] if heads else _identity
            count = 0
            for batch in batches:
                outputs = (_run_tangent if linearised else _run_outputs)(copied, base, task_vectors, batch)
                alone = [head(outputs(a, 0.0) if task == 0 else outputs(0.0, a)) for a in (first, second)[task]]
                count += alone[0].shape[0]
                for i, alpha in enumerate(first):
                    for j, beta in enumerate(second):
                        reference = alone[i if task == 0 else j]
                        totals[task, i, j] += measure(reference, head(outputs(alpha, beta))).double().sum()
            if not count:
                raise InputError(f"no inputs for task {task}")
            totals[task] /= count
    one, other = (float_rows(total) for total in totals)
    return Disentanglement(tuple(first), tuple(second), float_rows(totals.sum(0)), (one, other), linearised)


def disagreement(a: Tensor, b: Tensor) -> Tensor:
    """Return 1 where the arg-max differs, per sample (a mean over any further axes).

    Args:
        a: Logits, classes along the last axis.
        b: Logits of the same shape.
    """
    differs = (a.argmax(-1) != b.argmax(-1)).double()
    return torch.mean(differs.reshape(len(differs), -1), 1)


def euclidean(a: Tensor, b: Tensor) -> Tensor:
    """Return ‖a − b‖ per sample.

    Args:
        a: Outputs, samples along the first axis.
        b: Outputs of the same shape.
    """
    norms: Tensor = torch.linalg.vector_norm((a - b).flatten(1), dim=1)
    return norms


_DISTANCES: dict[str, Distance] = {"disagreement": disagreement, "euclidean": euclidean}


def _run_outputs(module: nn.Module, base: Weights, vectors: tuple[Weights, Weights], inputs: InputsLike) -> OutputsAt:
    def at(alpha: float, beta: float) -> Tensor:
        weights = dict(base)
        for scale, vector in zip((alpha, beta), vectors, strict=True):
            for name, delta in vector.items():
                if delta.is_floating_point():
                    weights[name] = weights[name] + scale * delta
        return call(module, weights, inputs)

    return at


def _run_tangent(module: nn.Module, base: Weights, vectors: tuple[Weights, Weights], inputs: InputsLike) -> OutputsAt:
    value, along_first = tangent(module, base, vectors[0], inputs)
    _, along_second = tangent(module, base, vectors[1], inputs)
    return lambda alpha, beta: value + alpha * along_first + beta * along_second


def _identity(outputs: Tensor) -> Tensor:
    return outputs
