"""Similarity of models: of weights (cosine, distance) and of representations (linear CKA, distance)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from merganser.analysis.inner_products import STATISTICS, distances, inner_products
from merganser.checkpoints.opening import Reference
from merganser.engine.geometry import cosines
from merganser.errors import InputError, did_you_mean, require_mapping
from merganser.modules.batches import InputsLike
from merganser.modules.functional import Weights, check_state, evaluation_copy, run
from merganser.plain import Result, float_rows

Matrix: TypeAlias = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class WeightSimilarity(Result):
    """Cosine and Euclidean distance between whole models, in the order of `names`."""

    names: tuple[str, ...]
    cosine: Matrix
    distance: Matrix


@dataclass(frozen=True)
class RepresentationSimilarity(Result):
    """Linear CKA and root mean square distance of one layer's outputs over the same `samples` inputs."""

    names: tuple[str, ...]
    layer: str
    samples: int
    cka: Matrix
    distance: Matrix


@dataclass(frozen=True)
class BeforeAfter(Result):
    """Means over pairs of different models, before and after alignment."""

    before: dict[str, float]
    after: dict[str, float]


def weight_similarity(models: Mapping[str, Reference], *, exclude: Sequence[str] = STATISTICS) -> WeightSimilarity:
    """Compare checkpoints (state dicts, modules, paths) weight by weight, streamed.

    Args:
        models: The models by name.
        exclude: Globs of tensors to leave out.
    """
    require_mapping("models", models)
    if not models:
        raise InputError("no models to compare")
    given = list(models.values())
    cosine = cosines(inner_products(given, exclude=exclude))
    return WeightSimilarity(tuple(models), float_rows(cosine), float_rows(distances(given, exclude=exclude)))


class LinearCKA:
    """Streaming linear CKA(X, Y) = ‖X_cᵀY_c‖² / (‖X_cᵀX_c‖ ‖Y_cᵀY_c‖) (Frobenius) between several representations.

    Exact, in float64, from sums over batches: memory is the square of the total width, for any number of samples.
    X_c is X with its columns centred; with K = XXᵀ and L = YYᵀ this is HSIC(K, L) / √(HSIC(K, K) HSIC(L, L)).
    """

    def __init__(self) -> None:
        self.samples = 0
        self._widths: list[int] = []
        self._shift = torch.empty(0)
        self._sum = torch.empty(0)
        self._product = torch.empty(0)

    def update(self, representations: Sequence[Tensor]) -> None:
        """Add one batch: the features [N, width] of the same N inputs for each model."""
        widths = [features.shape[1] for features in representations]
        joint = torch.cat([features.detach().to("cpu", torch.float64) for features in representations], 1)
        if not self._widths:
            self._widths = widths
            # Centring by the first batch avoids cancellation if means are large.
            self._shift = joint.mean(0)
            self._sum = torch.zeros(joint.shape[1], dtype=torch.float64)
            self._product = torch.zeros(joint.shape[1], joint.shape[1], dtype=torch.float64)
        elif widths != self._widths:
            raise InputError(f"representations of widths {widths}, earlier batches had {self._widths}")
        centred = joint - self._shift
        self.samples += joint.shape[0]
        self._sum += centred.sum(0)
        self._product.addmm_(centred.T, centred)

    def cka(self) -> NDArray[np.float64]:
        """Return the matrix of CKA between all models; NaN where a representation is constant."""
        blocks = self._blocks(self._product - torch.outer(self._sum, self._sum) / self.samples)
        hsic = np.array([[float(block.square().sum()) for block in row] for row in blocks])
        scale = np.sqrt(np.outer(np.diag(hsic), np.diag(hsic)))
        ratio: NDArray[np.float64] = np.divide(hsic, scale, out=np.full_like(hsic, np.nan), where=scale > 0)
        return ratio

    def distance(self) -> NDArray[np.float64]:
        """Return √mean ‖x − y‖² between all models; NaN where widths differ."""
        mean = self._sum / self.samples + self._shift
        second = self._product / self.samples - torch.outer(self._sum, self._sum) / self.samples**2
        blocks = self._blocks(second)
        means = torch.split(mean, self._widths)
        count = len(self._widths)
        table = np.full((count, count), np.nan)
        for i in range(count):
            for j in range(count):
                if self._widths[i] == self._widths[j]:
                    spread = torch.trace(blocks[i][i] + blocks[j][j] - 2 * blocks[i][j])
                    square = float(spread + (means[i] - means[j]).square().sum())
                    table[i, j] = max(square, 0.0) ** 0.5
        np.fill_diagonal(table, 0.0)
        return table

    def _blocks(self, matrix: Tensor) -> list[list[Tensor]]:
        if not self.samples:
            raise InputError("expected at least one batch")
        rows = torch.split(matrix, self._widths, 0)
        return [list(torch.split(row, self._widths, 1)) for row in rows]


def representation_similarity(
    module: nn.Module,
    states: Mapping[str, Weights],
    inputs: Iterable[InputsLike],
    layer: str,
    *,
    features: Callable[[Tensor], Tensor] | None = None,
) -> RepresentationSimilarity:
    """Compare the outputs of `layer` (a submodule's name) under each state dict, batch by batch, in evaluation mode.

    Linear CKA is invariant to permuted or rotated features; the distance is not, and decreases when models are aligned.

    Args:
        module: The network; it is not changed.
        states: State dicts by name.
        inputs: Batches of inputs.
        layer: The name of a submodule.
        features: Maps the layer's output to (samples, width); by default all axes but the first are flattened.
    """
    require_mapping("states", states)
    if not states:
        raise InputError("no models to compare")
    live = evaluation_copy(module)
    modules = dict(live.named_modules())
    if layer not in modules:
        raise InputError(f"the module has no submodule {layer!r}{did_you_mean(layer, modules)}")
    for name, state in states.items():
        check_state(live, state, name)
    captured: list[Tensor] = []
    flatten = features or (lambda output: output.flatten(1))

    def capture(_module: nn.Module, _args: Any, output: Any) -> None:
        # A copy: the next layer may change its input in place.
        captured.append(flatten(output[0] if isinstance(output, tuple) else output).clone())

    similarity = LinearCKA()
    modules[layer].register_forward_hook(capture)
    with torch.no_grad():
        for batch in inputs:
            captured.clear()
            for name, state in states.items():
                before = len(captured)
                live.load_state_dict(dict(state), strict=False)
                run(live, batch)
                if len(captured) != before + 1:
                    raise InputError(f"{layer!r} ran {len(captured) - before} times in one pass of {name!r}")
            similarity.update(captured)
    return RepresentationSimilarity(
        tuple(states), layer, similarity.samples, float_rows(similarity.cka()), float_rows(similarity.distance())
    )


def before_after(
    before: WeightSimilarity | RepresentationSimilarity, after: WeightSimilarity | RepresentationSimilarity
) -> BeforeAfter:
    """Return the mean of every measure over pairs of different models, before and after alignment.

    Args:
        before: The comparison before alignment.
        after: The same comparison after it.
    """
    if type(before) is not type(after) or before.names != after.names:
        raise InputError("before and after must be the same measure of the same models")
    measures = ("cosine", "distance") if isinstance(before, WeightSimilarity) else ("cka", "distance")

    def means(report: Result) -> dict[str, float]:
        return {measure: _mean_of_pairs(getattr(report, measure)) for measure in measures}

    return BeforeAfter(means(before), means(after))


def _mean_of_pairs(matrix: Matrix) -> float:
    values = np.array(matrix)
    return float(values[~np.eye(len(values), dtype=bool)].mean()) if len(values) > 1 else float("nan")
