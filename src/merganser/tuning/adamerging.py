"""AdaMerging: learn coefficients of task vectors by minimising the entropy of predictions on unlabelled inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

from merganser.engine.task_vector import TaskVector
from merganser.errors import InputError, one_of
from merganser.modules.batches import InputsLike
from merganser.modules.functional import Head, Weights, check_state, check_weights, evaluation_copy
from merganser.plain import Result
from merganser.tuning.entropy import minimise_entropy
from merganser.tuning.held_out import Data, Models, TaskHeads, label, match_data, match_heads, require_module
from merganser.tuning.parts import tsv_parts

PARTS: Mapping[str, Callable[[Mapping[str, Weights]], Mapping[str, Weights]]] = {
    "differences": lambda vectors: vectors,
    "tsv": tsv_parts,
}
"""What the coefficients scale."""
Wise: TypeAlias = Literal["task", "tensor"]
"""One coefficient for each task, or for each tensor of each task (what the paper calls layer-wise)."""


@dataclass(frozen=True)
class AdaMerging(Result):
    """Learned coefficients λ[task][tensor] (equal for all tensors if task-wise), and the entropy during training."""

    wise: Wise
    coefficients: dict[str, dict[str, float]]
    entropy_before: float
    entropy_after: float
    history: tuple[float, ...]
    """Entropy of each step's batches."""

    def merge(self, base: Weights, task_vectors: Mapping[str, Weights]) -> dict[str, Tensor]:
        """Return θ0 + Σ_t λ_t τ_t as new tensors in the base's dtypes, rounded once."""
        merged = {}
        for name, value in base.items():
            total = value.detach().clone()
            moves = [(self.coefficients[t][name], v[name]) for t, v in task_vectors.items() if name in v]
            if value.is_floating_point() and moves:
                total = total.to(torch.promote_types(value.dtype, torch.float32))
                for coefficient, vector in moves:
                    total.add_(vector.detach().to(total.dtype), alpha=coefficient)
            merged[name] = total.to(value.dtype)
        return merged


@torch.inference_mode(False)  # it learns by gradients
def adamerge(
    models: Models,
    base: nn.Module,
    data: Data,
    *,
    parts: str = "differences",
    heads: TaskHeads | None = None,
    wise: Wise = "tensor",
    init: float = 0.3,
    learning_rate: float = 1e-3,
    steps: int = 500,
    bounds: tuple[float, float] | None = None,
) -> tuple[dict[str, Tensor], AdaMerging]:
    """Merge with coefficients that minimise the entropy of predictions on unlabelled inputs.

    θ = θ0 + Σ_t λ_t τ_t, where λ minimises Σ_t H(softmax f(x_t; θ)) (Yang et al. 2024, arXiv:2310.02575).

    Args:
        models: Checkpoints, state dicts or modules, in a list or by label.
        base: The module θ0 that the models were fine-tuned from.
        data: Unlabelled batches for each model, in a list or by label.
        parts: What λ scales: `"differences"` τ_t = θ_t − θ0, or `"tsv"`, what each model adds to TSV-Merge.
        heads: For each model, a function from the module's output to its task's logits.
        wise: One coefficient for each `"task"`, or for each `"tensor"` of each task (the paper's layer-wise).
        init: The value that every λ starts from.
        learning_rate: Adam's learning rate; for small models use a larger one with fewer steps.
        steps: The number of updates of λ, each on one batch of every task.
        bounds: The range λ is clamped to, if any.

    Returns:
        The merged weights, and the learned coefficients with the entropy before and after.

    Raises:
        InputError: If the base is not a module, or data and models do not match.

    Example:
        >>> data = {"math": batches, "code": batches}
        >>> weights, learned = mg.tuning.adamerge(experts, base, data, steps=5)
        >>> learned.entropy_after < learned.entropy_before
        True
    """
    one_of("parts", parts, PARTS)
    module = require_module(base, "base")
    weights = module.state_dict()
    vectors = PARTS[parts]({key: TaskVector(model, module).state_dict() for key, model in label(models).items()})
    learned = learn_coefficients(
        module,
        weights,
        vectors,
        match_data(data, models),
        heads=match_heads(heads, models),
        wise=wise,
        init=init,
        learning_rate=learning_rate,
        steps=steps,
        bounds=bounds,
    )
    return learned.merge(weights, vectors), learned


def learn_coefficients(
    module: nn.Module,
    base: Weights,
    task_vectors: Mapping[str, Weights],
    inputs: Mapping[str, Sequence[InputsLike]],
    *,
    wise: Wise = "tensor",
    init: float = 0.3,
    learning_rate: float = 1e-3,
    steps: int = 500,
    bounds: tuple[float, float] | None = None,
    heads: Mapping[str, Head] | None = None,
) -> AdaMerging:
    """Minimise Σ_t H(softmax f(x_t; θ0 + Σ_t λ_t τ_t)) over λ by Adam, with one unlabelled batch per task and step.

    `task_vectors` may be plain differences or the per-task parts of another method (TSV-Merge's orthogonalised ones): λ
    only scales them. Module, base, vectors and inputs are not changed. The options are those of `adamerge`.
    """
    one_of("wise", wise, Wise)
    copied = evaluation_copy(module).requires_grad_(False)
    check_state(copied, base, "base")
    if not task_vectors or set(inputs) != set(task_vectors):
        raise InputError(
            f"task vectors are for {sorted(task_vectors)}, but inputs for {sorted(inputs)}; name the same tasks"
        )
    for task, vector in task_vectors.items():
        check_weights(copied, vector, f"task vector {task!r}")
    fixed = {name: value.detach() for name, value in base.items()}
    names = [n for n, v in fixed.items() if v.is_floating_point() and any(n in t for t in task_vectors.values())]
    columns = {name: index if wise == "tensor" else 0 for index, name in enumerate(names)}
    lam = torch.full((len(task_vectors), len(names) if wise == "tensor" else 1), init, requires_grad=True)

    def merged() -> dict[str, Tensor]:
        clamped = lam if bounds is None else lam.clamp(*bounds)
        weights = dict(fixed)
        for row, vector in zip(clamped, task_vectors.values(), strict=True):
            for name in vector:
                if name in columns:
                    weights[name] = weights[name] + row[columns[name]].to(weights[name]) * vector[name].detach()
        return weights

    found = minimise_entropy(copied, merged, [lam], inputs, heads=heads, learning_rate=learning_rate, steps=steps)
    learned = (lam if bounds is None else lam.clamp(*bounds)).detach()
    coefficients = {
        task: {name: float(row[columns[name]]) for name in names}
        for task, row in zip(task_vectors, learned, strict=True)
    }
    return AdaMerging(wise, coefficients, found.before, found.after, found.history)
