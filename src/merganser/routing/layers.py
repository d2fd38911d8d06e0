"""Choose experts and layers to route with: redundancy, separability from the library alone, a sweep with data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from merganser.engine.geometry import cosines
from merganser.errors import InputError
from merganser.interference.sti import Overlap
from merganser.kernels.spectra import Factors
from merganser.library.library import Library
from merganser.library.unfolding import is_matrix
from merganser.modules.activations import matrix_layers, output_layers
from merganser.routing.choices import task_accuracy
from merganser.routing.routers import ProjectionRouter
from merganser.routing.samples import batches_by_task

if TYPE_CHECKING:
    from merganser.routing.adaptive import AdaptiveModel


def task_cosines(library: Library) -> Tensor:
    """Return the cosines of all pairs of task vectors, from the stored factors."""
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
    return torch.from_numpy(cosines(products.numpy()))


def distinct_experts(library: Library, redundancy: float | None) -> tuple[str, ...]:
    """Return, in the library's order, the experts whose cosine with every accepted one is at most ε; all for `None`."""
    if redundancy is None:
        return library.experts
    if not -1 <= redundancy <= 1:
        raise InputError(f"redundancy {redundancy}: a cosine lies between -1 and 1")
    return filter_redundant(library.experts, task_cosines(library), redundancy)


def filter_redundant(names: Sequence[str], cosines: Tensor, redundancy: float) -> tuple[str, ...]:
    """Return the names that a greedy filter on a table of cosines keeps."""
    kept: list[int] = []
    for index in range(len(names)):
        if all(float(cosines[index, other]) <= redundancy for other in kept):
            kept.append(index)
    return tuple(names[index] for index in kept)


#: Number of layers with inputs of the same width that approximate the unknown inputs of a layer.
NEIGHBOURS = 4


@dataclass(frozen=True)
class LayerScore:
    """How well a layer should separate tasks, estimated from the library, and how well it does on data, if given.

    A gradient's right singular vectors are combinations of the layer's inputs, so V_t Σ_t of a *neighbouring* layer
    with inputs of the same width approximates the inputs of this one on task t. With the share e_j(t) = Σ_l σ_l² ‖V_jᵀ
    v_l‖² / Σ_l σ_l² of it in the subspace of task j, `margin` is the mean over tasks and neighbours of e_t(t) −
    max_{j≠t} e_j(t). `separability` is the mean of 1 − max_{j≠t} e_j(t) with the layer's own V_t Σ_t: 1 for orthogonal
    subspaces, 0 for equal ones, for any input; `chance` is its value for unrelated subspaces of these ranks.
    """

    layer: str
    margin: float
    separability: float
    chance: float
    accuracy: float | None = None
    accuracy_among_top: float | None = None


def score_layers(module: nn.Module, library: Library) -> list[LayerScore]:
    """Score every linear layer and convolution that all experts changed, without data.

    Args:
        module: The network of the base.
        library: The experts.

    Returns:
        One score for each layer, in the module's order.

    Raises:
        InputError: If no layer was changed by every expert.

    Example:
        >>> best = max(mg.routing.score_layers(encoder, library), key=lambda score: score.margin)
    """
    factors = {}
    for layer in _routable(library, module):
        found = [library.factors(name, f"{layer}.weight") for name in library.experts]
        if present := [f for f in found if f is not None and f.rank]:
            factors[layer] = present
    factors = {layer: found for layer, found in factors.items() if len(found) == len(library)}
    if not factors:
        raise InputError("no layer of the module was changed by every expert: there is nothing to route on")
    return [_score(layer, factors) for layer in factors]


def _score(layer: str, factors: Mapping[str, Sequence[Factors]]) -> LayerScore:
    own = factors[layer]
    order = list(factors)
    width = own[0].v.shape[0]
    alike = [other for other in order if other != layer and factors[other][0].v.shape[0] == width]
    near = sorted(alike, key=lambda other: abs(order.index(other) - order.index(layer)))[:NEIGHBOURS] or [layer]
    margins = [_margin(_shares(factors[other], own)) for other in near]
    return LayerScore(
        layer,
        sum(margins) / len(margins),
        1 - float(_best_other(_shares(own, own)).mean()),
        1 - sum(f.rank for f in own) / len(own) / width,
    )


def _shares(inputs: Sequence[Factors], subspaces: Sequence[Factors]) -> Tensor:
    """Return e_j(t): rows are tasks with their inputs, columns the subspaces that hold them."""
    rows = []
    for task in inputs:
        energy = task.s.square() / task.s.square().sum()
        rows.append(torch.stack([energy @ (task.v.T @ other.v).square().sum(1) for other in subspaces]))
    return torch.stack(rows).clamp(max=1)


def _best_other(shares: Tensor) -> Tensor:
    return shares.clone().fill_diagonal_(0).amax(1)


def _margin(shares: Tensor) -> float:
    return float((shares.diagonal() - _best_other(shares)).mean())


def _routable(library: Library, module: nn.Module) -> list[str]:
    """Return the layers of the module that are matrices of the base, and of the same shape in every expert."""
    return [
        layer
        for layer in matrix_layers(module)
        if library.is_shared(f"{layer}.weight") and is_matrix(library.base.spec(f"{layer}.weight").shape)
    ]


def leading_layers(library: Library, module: nn.Module, share: float = 0.5) -> list[str]:
    """Return the first `share` of the layers that experts changed.

    A router over several layers beats the best single one, and the later layers add little, so that the first pass can
    stop half-way. Output layers count only if there are no others.
    """
    kinds = {name for expert in library.experts for name in library.expert(expert).file.kinds}
    layers = [layer for layer in _routable(library, module) if f"{layer}.weight" in kinds]
    if not layers:
        raise InputError(
            "no linear layer or convolution of the module was changed by an expert: there is nothing to route on"
        )
    last = output_layers(module)
    inner = [layer for layer in layers if layer not in last] or layers
    return inner[: max(1, round(share * len(inner)))]


def sweep_layers(model: AdaptiveModel, batches: Mapping[str, Iterable[Any]], top: int = 3) -> list[LayerScore]:
    """Score every layer, with the task accuracy of a projection router at that layer alone.

    Args:
        model: The adaptive model, whose first pass is used. One pass serves all layers.
        batches: Batches of every task.
        top: For `accuracy_among_top`, how many tasks count.

    Returns:
        One score for each layer, in the module's order.

    Example:
        >>> model = mg.routing.AdaptiveModel(encoder, library, heads)
        >>> scores = mg.routing.sweep_layers(model, {"math": [images], "code": [images]})
    """
    known = batches_by_task(batches, model.library.experts, model.module)
    scores = score_layers(model.module, model.library)
    layers = [score.layer for score in scores]
    whole = model.with_settings(per_batch=False, probes=None)
    seen: dict[str, list[Tensor]] = {layer: [] for layer in layers}
    truth: list[str] = []
    for task, parts in known.items():
        for inputs in parts:
            activations = whole.first_pass(inputs, layers)
            truth += [task] * inputs.size
            for layer, z in activations.inputs.items():
                seen[layer].append(z)
    results = []
    for score in scores:
        router = ProjectionRouter.of(model.library, score.layer)
        weights = router.weights({score.layer: torch.cat(seen[score.layer])})
        found = task_accuracy(router.tasks, weights, truth, top)
        results.append(replace(score, accuracy=found.first, accuracy_among_top=found.among))
    return results
