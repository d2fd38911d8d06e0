"""Which experts and which layer to route with: redundancy, separability by the library alone, a sweep with data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from merganser.errors import InputError
from merganser.experts.activations import linear_layers
from merganser.experts.inputs import Inputs
from merganser.experts.library import Library
from merganser.experts.routing import ProjectionRouter, task_accuracy
from merganser.experts.sti import Overlap

if TYPE_CHECKING:
    from merganser.experts.adaptive import AdaptiveModel


def task_cosines(library: Library) -> Tensor:
    """Cosines of the whole task vectors, from the stored factors."""
    experts = [library.expert(name) for name in library.experts]
    products = torch.zeros(len(experts), len(experts), dtype=torch.float64)
    for name in library.base.names():
        changed = [index for index, expert in enumerate(experts) if name in expert.file.kinds and expert.merges(name)]
        if not changed:
            continue
        if all(experts[index].file.kinds[name] == "factors" for index in changed):
            factors = [experts[index].factors(name) for index in changed]
            part = Overlap.of([f for f in factors if f is not None]).inner_products()
        else:
            deltas = torch.stack([experts[index].delta(name).flatten().double() for index in changed])
            part = deltas @ deltas.T
        products[torch.tensor(changed)[:, None], torch.tensor(changed)] += part
    norms = products.diagonal().clamp(min=1e-300).sqrt()
    return products / norms[:, None] / norms


def distinct_experts(library: Library, redundancy: float | None) -> tuple[str, ...]:
    """In the library's order, the experts whose cosine with every accepted one is at most ε; all of them for None."""
    if redundancy is None:
        return library.experts
    if not -1 <= redundancy <= 1:
        raise InputError(f"redundancy {redundancy}: a cosine lies between -1 and 1")
    return accepted(library.experts, task_cosines(library), redundancy)


def accepted(names: Sequence[str], cosines: Tensor, redundancy: float) -> tuple[str, ...]:
    """The greedy filter on a table of cosines."""
    kept: list[int] = []
    for index in range(len(names)):
        if all(float(cosines[index, other]) <= redundancy for other in kept):
            kept.append(index)
    return tuple(names[index] for index in kept)


@dataclass(frozen=True)
class LayerScore:
    """How far apart the subspaces of the tasks are at a layer.

    `separability`: for z drawn from a task's own spectrum (z = V_t Σ_t g), the share of ‖z‖² that the best other task's
    subspace leaves over, 1 − max_{j≠t} Σ_l σ_l² ‖V_jᵀ v_l‖² / Σ_l σ_l², averaged over tasks. 1 for orthogonal
    subspaces, 0 for equal ones.
    `chance`: the same for unrelated subspaces of these ranks. `accuracy`: task accuracy, where data were given.
    """

    layer: str
    separability: float
    chance: float
    accuracy: float | None = None
    accuracy_among_top: float | None = None


def separability(library: Library, layer: str) -> LayerScore | None:
    """The score of a layer; none if fewer than two experts changed it."""
    tensor = f"{layer}.weight"
    found = [library.factors(name, tensor) for name in library.experts]
    factors = [f for f in found if f is not None and f.rank]
    if len(factors) < 2:
        return None
    margins, expected = [], []
    for own in factors:
        energy = own.s.square() / own.s.square().sum()
        others = [other for other in factors if other is not own]
        # A subspace of another task may be stored at a rank so high that it holds everything.
        shares = [float(energy @ (own.v.T @ other.v).square().sum(1)) for other in others]
        margins.append(1 - min(1.0, max(shares)))
        expected.append(1 - max(other.rank for other in others) / own.v.shape[0])
    return LayerScore(layer, sum(margins) / len(margins), sum(expected) / len(expected))


def score_layers(library: Library, module: nn.Module) -> list[LayerScore]:
    """Separability of every linear layer that experts changed, in the module's order. Needs no data."""
    scores = []
    for layer in linear_layers(module):
        if f"{layer}.weight" in library.base and (score := separability(library, layer)) is not None:
            scores.append(score)
    if not scores:
        raise InputError("no linear layer of the module was changed by two experts: nothing to route on")
    return scores


def best_layer(library: Library, module: nn.Module) -> str:
    """The layer with the largest separability; with a single expert, any layer it changed."""
    if len(library) == 1:
        for layer in linear_layers(module):
            if library.factors(library.experts[0], f"{layer}.weight") is not None:
                return layer
    return max(score_layers(library, module), key=lambda score: score.separability).layer


def sweep_layers(model: AdaptiveModel, batches: Mapping[str, Sequence[Inputs]], top: int = 3) -> list[LayerScore]:
    """Every layer with its separability and the task accuracy of the projection router there, on batches whose task is
    known. One pass through the model's first-pass weights sees all layers."""
    scores = score_layers(model.library, model.module)
    layers = [score.layer for score in scores]
    whole = model.with_settings(per_batch=False, probes=None)
    seen: dict[str, list[Tensor]] = {layer: [] for layer in layers}
    truth: list[str] = []
    for task, parts in batches.items():
        for batch in parts:
            activations = whole.first_pass(batch, layers)
            truth += [task] * batch.size
            for layer, z in activations.inputs.items():
                seen[layer].append(z)
    results = []
    for score in scores:
        router = ProjectionRouter.of(model.library, score.layer)
        weights = router.weights({score.layer: torch.cat(seen[score.layer])})
        found = task_accuracy(router.tasks, weights, truth, top)
        results.append(LayerScore(score.layer, score.separability, score.chance, found.first, found.among))
    return results
