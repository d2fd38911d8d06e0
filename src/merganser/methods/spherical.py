"""Interpolation on spheres: the Gram matrix of the whole tensor, then a linear combination block by block."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from merganser.errors import RecipeError
from merganser.kernels import spheres
from merganser.kernels.arrays import Reals
from merganser.lazy import torch
from merganser.methods.averages import cancel, weighted_sum
from merganser.methods.base import Blocks, Group, Method, Reduction
from merganser.methods.parameters import param, per_model
from merganser.methods.registry import register

if TYPE_CHECKING:
    from torch import Tensor


def vectors(group: Group) -> tuple[Tensor, ...]:
    """Return the vectors to combine: task vectors if there is a base, else the models."""
    return group.models if group.base is None else tuple(group.deltas())


def back_to_weights(group: Group, combined: Tensor) -> Tensor:
    return combined if group.base is None else combined.add_(group.base)


def gram(blocks: Blocks) -> Reals:
    return spheres.combine(blocks.map(lambda group: spheres.gram(vectors(group))))


@register
@dataclass(frozen=True)
class Slerp(Method):
    """θ = (sin((1−t)φ) θ_a + sin(tφ) θ_b) / sin φ, φ the angle between the flattened tensors.

    θ_a is the base, or the first of two models without a base. Linear where |cos φ| > 0.9995. Shoemake 1985,
    Animating rotation with quaternion curves.
    """

    name = "slerp"
    summary = "great-circle interpolation between two models"
    reach = "reduce_map"
    base = "optional"
    models = (1, 2)
    t: float = param(help="0 is the base (or the first model), 1 the other model")

    @classmethod
    def check_inputs(cls, models: int, base: bool, where: str = "") -> None:
        if models + base != 2:
            raise RecipeError(
                f"{where or 'method slerp'}: expected a base and one model, or two models and no base, "
                f"got {models} model(s) and {'a' if base else 'no'} base"
            )

    def reduce(self, blocks: Blocks) -> Reduction:
        matrix = spheres.combine(blocks.map(lambda group: spheres.gram(_ends(group))))
        return spheres.slerp(matrix, self.t).tolist()

    def merge(self, group: Group, state: Reduction = None) -> Tensor:
        return weighted_sum(_ends(group), state)


def _ends(group: Group) -> tuple[Tensor, ...]:
    return group.models if group.base is None else (group.base, *group.models)


@register
@dataclass(frozen=True)
class NuSlerp(Method):
    """SLERP between two models at t = w_2 / (w_1 + w_2), of task vectors if there is a base.

    Unless `flatten` is set, vectors along the last axis are interpolated separately; with `row_wise` (mergekit's name
    for it) those along the first axis. Linear only where sin φ < 1e-8.
    """

    name = "nuslerp"
    summary = "slerp by weights between two models or task vectors, whole tensors or vector by vector"
    reach = "reduce_map"
    base = "optional"
    models = (2, 2)
    weight: tuple[float, ...] = per_model(1.0, "relative weight of each model")
    flatten: bool = param(True, "one angle for the whole tensor", aliases=("nuslerp_flatten",))
    row_wise: bool = param(
        False, "if not flattened: vectors along the first axis, not the last", aliases=("nuslerp_row_wise",)
    )

    @property
    def t(self) -> float:
        total = sum(self.weight)
        return 0.5 if abs(total) < 1e-6 else self.weight[1] / total

    def reduce(self, blocks: Blocks) -> Reduction:
        """Return two coefficients; or two per column; or nothing, if each block contains whole vectors."""
        if self.flatten or len(blocks.shape) < 2:
            return spheres.slerp(gram(blocks), self.t, parallel=1 - 1e-16).tolist()
        if not self.row_wise:
            return None
        columns = math.prod(blocks.shape[1:])
        parts = blocks.map(lambda g: (g.offset % max(1, columns), _products(vectors(g), 0).flatten(1)))
        sums = torch.zeros(3, columns, dtype=torch.float64, device=parts[0][1].device)
        for start, part in parts:
            sums[:, start : start + part.shape[1]] += part
        return _coefficients(sums, self.t)

    def merge(self, group: Group, state: Reduction = None) -> Tensor:
        a, b = vectors(group)
        if isinstance(state, list):
            return back_to_weights(group, weighted_sum((a, b), state))
        if state is None:
            pair = _coefficients(_products((a, b), -1), self.t).unsqueeze(-1)
        else:
            start = group.offset % max(1, state.shape[1])
            pair = state[:, start : start + math.prod(a.shape[1:])].view(2, *a.shape[1:])
        first, second = pair.to(a)
        return back_to_weights(group, (a * first).add_(b * second))


def _products(pair: tuple[Tensor, ...], axis: int) -> Tensor:
    """Return ⟨a, a⟩, ⟨a, b⟩, ⟨b, b⟩ along an axis, in float64."""
    a, b = (vector.double() for vector in pair)
    return torch.stack([spheres.sums(x * y, axis) for x, y in ((a, a), (a, b), (b, b))])


def _coefficients(products: Tensor, t: float) -> Tensor:
    """Return `spheres.slerp` for many pairs of vectors at once."""
    aa, ab, bb = products
    norms = (aa * bb).sqrt()
    angle = torch.where(norms == 0, 0.0, ab / norms).clamp(-1, 1).acos()
    sine = angle.sin()
    linear = sine < 1e-8
    first = torch.where(linear, 1 - t, ((1 - t) * angle).sin() / sine)
    return torch.stack([first, torch.where(linear, t, (t * angle).sin() / sine)])


@register
@dataclass(frozen=True)
class MultiSlerp(Method):
    """θ = θ_0 + (Σ w ‖x_t‖) m / ‖m‖ with m = Σ w x_t / ‖x_t‖: the mean direction at the mean length.

    x_t are task vectors if there is a base, else the models themselves (and θ_0 = 0). mergekit also describes a step in
    the tangent space at m, which vanishes: the weighted tangents sum to m − ⟨m, m⟩m/‖m‖² = 0. If the directions cancel,
    or all task vectors are zero, the result is Σ w x_t (mergekit raises an error).
    """

    name = "multislerp"
    summary = "barycentre of directions on the sphere, for any number of models"
    reach = "reduce_map"
    base = "optional"
    weight: tuple[float, ...] = per_model(1.0, "relative weight of each model")
    normalize: bool = param(True, "divide the weights by their sum", aliases=("normalize_weights",))
    epsilon: float = param(1e-8, "below this length directions cancel", low=0, aliases=("eps",))

    def __post_init__(self) -> None:
        if self.normalize and self.weight and cancel(self.weight):
            raise RecipeError("multislerp.weight: the weights sum to zero; change one, or set normalize to false")

    def reduce(self, blocks: Blocks) -> Reduction:
        total = sum(self.weight) if self.normalize else 1.0
        weights = [w / total for w in self.weight]
        if len(weights) == 1:
            return [abs(weights[0])]  # a negative weight flips both the length and the direction
        return spheres.barycentre(gram(blocks), weights, self.epsilon).tolist()

    def merge(self, group: Group, state: Reduction = None) -> Tensor:
        return back_to_weights(group, weighted_sum(vectors(group), state))


@register
@dataclass(frozen=True)
class Karcher(Method):
    """θ = (Σ w ‖θ_t‖) u, u the Karcher mean of the directions θ_t / ‖θ_t‖ on the sphere.

    Iterates u ← exp_u(Σ w log_u(u_t)) from the normalised mean. Where the directions cancel, as of a model and its
    negative, θ is the plain weighted mean. The mean stays in the span of the models, so the
    iterations run on the Gram matrix without a pass over the data. Karcher 1977, Riemannian center of mass.
    """

    name = "karcher"
    summary = "Karcher (Riemannian) mean of the models on the sphere"
    reach = "reduce_map"
    weight: tuple[float, ...] = per_model(1.0, "relative weight of each model", low=0)
    iterations: int = param(10, "maximum number of iterations", low=0, aliases=("max_iter",))
    tolerance: float = param(1e-5, "length of the tangent step that ends the iterations", low=0, aliases=("tol",))

    def __post_init__(self) -> None:
        if self.weight and sum(self.weight) == 0:
            raise RecipeError("karcher.weight: the weights sum to zero; change one")

    def reduce(self, blocks: Blocks) -> Reduction:
        if len(self.weight) == 1:
            return [1.0]
        matrix = spheres.combine(blocks.map(lambda group: spheres.gram(group.models)))
        return spheres.karcher(matrix, self.weight, self.iterations, self.tolerance).tolist()

    def merge(self, group: Group, state: Reduction = None) -> Tensor:
        return weighted_sum(group.models, state)
