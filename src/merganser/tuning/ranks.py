"""AdaRank: learn on unlabelled inputs which singular components of each task matrix to merge."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from merganser.engine.task_vector import TaskVector
from merganser.kernels.spectra import Factors, top_svd
from merganser.methods.adarank import components
from merganser.methods.matrices import rank_kept
from merganser.modules.functional import Weights, evaluation_copy
from merganser.recipes.running import merge
from merganser.tuning.entropy import Descent, minimise_entropy
from merganser.tuning.held_out import Data, Models, TaskHeads, label, match_data, match_heads, require_module
from merganser.tuning.statistics import Statistics

#: Initial score of a component, above or below the decision threshold of zero: some hundred steps away from it.
START = 0.1


@dataclass(frozen=True, eq=False)
class LearnedRanks:
    """The result of AdaRank.

    Attributes:
        components: By model, the statistics for the method `adarank`; `save` writes them.
        kept: By model and tensor, the number of merged singular components.
        entropy: The entropy of the predictions during training.
    """

    components: dict[str, Statistics]
    kept: dict[str, dict[str, int]]
    entropy: Descent


@torch.inference_mode(False)  # it learns by gradients
def adarank(
    models: Models,
    base: nn.Module,
    data: Data,
    *,
    heads: TaskHeads | None = None,
    init: float = 0.3,
    rank_fraction: float = 1.0,
    learning_rate: float = 1e-3,
    steps: int = 500,
) -> tuple[dict[str, Tensor], LearnedRanks]:
    """Merge the singular components of task matrices that minimise the entropy of predictions on unlabelled inputs.

    θ = θ0 + Σ_t λ_t U_t diag(b_t ⊙ σ_t) V_tᵀ with a binary mask b_t and a coefficient λ_t for every tensor, learned
    together; the rounding of b_t has a straight-through gradient (Lee et al. 2026, arXiv:2503.22178). Tensors that are
    not matrices have only a coefficient. Keeps two factors of every task matrix in memory.

    Args:
        models: Checkpoints, state dicts or modules, in a list or by label.
        base: The module θ0 that the models were fine-tuned from.
        data: Unlabelled batches for each model, in a list or by label.
        heads: For each model, a function from the module's output to its task's logits.
        init: The value that every λ starts from.
        rank_fraction: The share of leading components in the initial merge.
        learning_rate: Adam's learning rate.
        steps: The number of updates of masks and coefficients, each on one batch of every task.

    Returns:
        The merged weights and the result, whose `components` give the same merge in a recipe.

    Raises:
        InputError: If the base is not a module, or data and models do not match.

    Example:
        >>> data = {"math": batches, "code": batches}
        >>> weights, learned = mg.tuning.adarank(experts, base, data, steps=5)
        >>> learned.components["math"].tensors["0.weight"].shape
        torch.Size([8])
    """
    module = evaluation_copy(require_module(base, "base")).requires_grad_(False)
    fixed = {name: value.detach() for name, value in module.state_dict().items()}
    vectors = {key: TaskVector(model, base).state_dict() for key, model in label(models).items()}
    tasks = {
        key: [_Selection(name, value, init, rank_fraction) for name, value in vector.items() if name in fixed]
        for key, vector in vectors.items()
    }

    def merged() -> Weights:
        weights = dict(fixed)
        for parts in tasks.values():
            for part in parts:
                weights[part.name] = weights[part.name] + part.matrix().to(weights[part.name])
        return weights

    learned = [tensor for parts in tasks.values() for part in parts for tensor in part.learned()]
    entropy = minimise_entropy(
        module,
        merged,
        learned,
        match_data(data, models),
        heads=match_heads(heads, models),
        learning_rate=learning_rate,
        steps=steps,
    )
    chosen = {
        key: Statistics("components", {part.name: part.factors() for part in parts}, len(entropy.history))
        for key, parts in tasks.items()
    }
    kept = {key: {part.name: part.kept() for part in parts} for key, parts in tasks.items()}
    sides = [statistics.tensors for statistics in chosen.values()]
    weights = merge(models, "adarank", base, statistics={"components": sides})
    return weights, LearnedRanks(chosen, kept, entropy)


class _Selection:
    """The task vector of one tensor as singular components, with a score per component and one coefficient."""

    def __init__(self, name: str, delta: Tensor, init: float, rank_fraction: float) -> None:
        self.name, self.shape = name, delta.shape
        self.count = components(tuple(delta.shape))
        self.coefficient = torch.tensor(init, requires_grad=True)
        self.delta = delta
        self.found: Factors | None = None
        self.scores = torch.full((self.count,), START)
        if self.count > 1:
            found = top_svd(delta.flatten(1), self.count)
            self.found = Factors(*(part.float() for part in found))
            self.scores[rank_kept(self.count, 1, rank_fraction) :] = -START
            self.scores.requires_grad_()

    def learned(self) -> list[Tensor]:
        return [self.coefficient, *([self.scores] if self.found else [])]

    def matrix(self) -> Tensor:
        """Return λ U diag(b ⊙ σ) Vᵀ; b is rounded, with the gradient of the scores."""
        if self.found is None:
            return self.coefficient * self.delta
        mask = (self.scores > 0).float() + self.scores - self.scores.detach()
        weighted = self.found.u * (self.found.s * mask[: self.found.rank])
        return self.coefficient * (weighted @ self.found.v.T).view(self.shape)

    def factors(self) -> Tensor:
        """Return λ b, the factor of every component."""
        return (self.coefficient * (self.scores > 0)).detach()

    def kept(self) -> int:
        return int((self.scores > 0).sum())
