"""Routers compute weights of the experts from the inputs of layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from merganser.errors import InputError, did_you_mean, one_of
from merganser.library.library import Library
from merganser.library.unfolding import is_matrix
from merganser.methods.matrices import matrix_shape
from merganser.modules.activations import Layer, input_width

#: The model of the first pass: the base, or the fixed merge of the experts.
RoutingSource = Literal["base", "fixed"]
#: softmax of the raw scores (thesis), or of their z-scores over the tasks (see `normalized`).
Normalize = Literal["softmax", "zscore"]
#: Residuals of several layers are fractions of one, and their softmax is nearly flat: no weight would reach a
#: threshold, and every set would be only the best task.
DEFAULT: Normalize = "zscore"
#: Scores that spread by less than this share of their mean are near ties: of two text experts, the one with the smaller
#: residual is right in 56 % of cases at a spread of 0.3 %, in 77 % at 1.2 %, in 99 % above 3 %.
TIE = 0.02


class Router(Protocol):
    """Computes the probability of each task for every sample from pooled inputs of `layers` in the model `source`."""

    @property
    def tasks(self) -> tuple[str, ...]: ...

    @property
    def layers(self) -> tuple[str, ...]: ...

    @property
    def source(self) -> RoutingSource: ...

    def weights(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return the probability of each task for every sample, shape (samples, tasks)."""
        ...


def normalized(scores: Tensor, how: Normalize) -> Tensor:
    """Return softmax(s) of scores s over tasks, or softmax((s − mean s)/max(std s, TIE · mean |s|)) with `zscore`.

    z-scores are dimensionless, so that the weights do not depend on the unit of the scores. On their own they would
    also lose how far apart the scores are (z-scores of two numbers are always ±1); the second term keeps near ties
    near.
    """
    if how == "zscore":
        spread = scores.std(dim=1, keepdim=True, correction=0)
        tie = TIE * scores.abs().mean(dim=1, keepdim=True)
        scores = (scores - scores.mean(dim=1, keepdim=True)) / spread.maximum(tie).clamp(min=1e-12)
    return scores.softmax(dim=1)


@dataclass(frozen=True)
class ProjectionRouter:
    """A router without data: tasks are weighted by how well their singular vectors explain a layer's input.

    w = softmax(−r), or of its z-scores, with r_t = ‖z − V_t V_tᵀ z‖ = √(‖z‖² − ‖V_tᵀ z‖²), where z is the input of a
    layer and V_t the right singular vectors of the task's update of that layer. Choosing the smallest residual is the
    maximum a posteriori estimate for z = V_t a + ε with isotropic Gaussian ε and equal priors. Over several layers, the
    residuals are divided by ‖z‖ and averaged, so that no layer counts more because its inputs are larger.

    Args:
        tasks: Names of the experts.
        subspaces: For each layer, an orthonormal basis for every task, shape (width, rank).
        source: The model of the first pass: the `"fixed"` merge or the `"base"`.
        normalize: `"zscore"` (default) or `"softmax"`.

    Example:
        >>> router = mg.routing.ProjectionRouter.of(library, ["0", "2"])
        >>> model = mg.routing.AdaptiveModel(encoder, library, heads, router=router)
    """

    tasks: tuple[str, ...]
    subspaces: Mapping[str, tuple[Tensor, ...]]
    source: RoutingSource = "fixed"
    normalize: Normalize = DEFAULT

    def __post_init__(self) -> None:
        one_of("source", self.source, RoutingSource)
        one_of("normalize", self.normalize, Normalize)

    @classmethod
    def of(
        cls,
        library: Library,
        layers: str | Sequence[str],
        source: RoutingSource = "fixed",
        normalize: Normalize = DEFAULT,
    ) -> ProjectionRouter:
        """Build the router for some layers from the singular vectors that a library stores."""
        names = (layers,) if isinstance(layers, str) else tuple(layers)
        if not names:
            raise InputError("a projection router needs at least one layer")
        return cls(
            library.experts, {layer: subspaces(library, f"{layer}.weight") for layer in names}, source, normalize
        )

    @property
    def layers(self) -> tuple[str, ...]:
        return tuple(self.subspaces)

    def residuals(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return r, shape (samples, tasks); over several layers the mean of r/‖z‖."""
        parts = []
        for layer, bases in self.subspaces.items():
            z = inputs[layer]
            r = residuals(z, bases)
            parts.append(r if len(self.subspaces) == 1 else r / z.double().norm(dim=1, keepdim=True).clamp(min=1e-30))
        return torch.stack(parts).mean(0)

    def weights(self, inputs: Mapping[str, Tensor]) -> Tensor:
        return normalized(-self.residuals(inputs), self.normalize)


@dataclass(frozen=True)
class CalibratedRouter:
    """A projection router whose residuals are calibrated on a few dozen samples of every task.

    Residuals of tasks do not compare by themselves: the subspaces of one task may hold more of any input than those of
    another, and tasks may be alike. Linear discriminant analysis learns both: the residuals r of a task's samples are
    Gaussian, with a mean μ_t of its own and one covariance C for all tasks, so that w = softmax over t of −½ (r − μ_t)ᵀ
    C⁻¹ (r − μ_t), which is linear in r. In units of each residual's spread, C = (1 − λ) S + λ (tr S / T) I, with S the
    covariance around the means.

    Args:
        router: The projection router.
        weight: The coefficients of every task, shape (tasks, tasks).
        bias: Their constants, one for each task.

    Example:
        >>> router = mg.routing.ProjectionRouter.of(library, ["0", "2"], source="base")
        >>> support = {task: {"0": torch.randn(4, 8), "2": torch.randn(4, 16)} for task in library.experts}
        >>> router = mg.routing.CalibratedRouter.fit(router, support)
    """

    router: ProjectionRouter
    weight: Tensor
    bias: Tensor

    @classmethod
    def fit(
        cls, router: ProjectionRouter, support: Mapping[str, Mapping[str, Tensor]], shrinkage: float = 0.2
    ) -> CalibratedRouter:
        """Calibrate a router on some inputs of its layers for every task; labels are not needed.

        Args:
            router: The projection router.
            support: For every task, the inputs of each layer, of shape (samples, width); `first_pass` returns them.
            shrinkage: λ, above 0 and at most 1.

        Returns:
            The calibrated router.
        """
        if not 0 < shrinkage <= 1:
            raise InputError(f"shrinkage {shrinkage}: must be above 0 and at most 1")
        if missing := [task for task in router.tasks if task not in support]:
            raise InputError(f"no support of task {missing[0]!r}: give some inputs of the layers for every task")
        found = [router.residuals(support[task]) for task in router.tasks]
        every = torch.cat(found)
        centre, spread = every.mean(0), every.std(0, correction=0).clamp(min=1e-9)
        unit = [(r - centre) / spread for r in found]
        means = torch.stack([r.mean(0) for r in unit])
        around = torch.cat([r - mean for r, mean in zip(unit, means, strict=True)])
        covariance = (1 - shrinkage) * around.T @ around / len(around)
        # Single samples of every task have no covariance.
        covariance.diagonal().add_(shrinkage * around.square().mean().clamp(min=1e-3))
        weight = torch.linalg.solve(covariance, means.T).T / spread
        return cls(router, weight, -(weight * (means * spread / 2 + centre)).sum(1))

    @property
    def tasks(self) -> tuple[str, ...]:
        return self.router.tasks

    @property
    def layers(self) -> tuple[str, ...]:
        return self.router.layers

    @property
    def source(self) -> RoutingSource:
        return self.router.source

    def weights(self, inputs: Mapping[str, Tensor]) -> Tensor:
        r = self.router.residuals(inputs)
        return F.linear(r, self.weight.to(r), self.bias.to(r)).softmax(dim=1)


def residuals(z: Tensor, bases: Sequence[Tensor]) -> Tensor:
    """Return √(‖z‖² − ‖V_tᵀ z‖²), shape (samples, tasks), in float64 from products in the precision of the bases."""
    whole = z.double().square().sum(1)
    left = [whole - (z.to(basis) @ basis).double().square().sum(1) for basis in bases]
    return torch.stack(left, dim=1).clamp(min=0).sqrt()


def subspaces(library: Library, tensor: str) -> tuple[Tensor, ...]:
    """Return for each expert an orthonormal basis of its right singular vectors; empty if it changed nothing.

    Vectors stored in half precision or int8 are orthogonalised again.
    """
    if tensor not in library.base:
        raise library.base.missing(tensor)
    shape = library.base.spec(tensor).shape
    if len(shape) != 2 and not is_matrix(shape):
        raise InputError(f"{tensor!r} has shape {list(shape)}: routing projects onto the singular vectors of a matrix")
    bases = []
    for name in library.experts:
        factors = library.factors(name, tensor)
        v = torch.zeros(matrix_shape(shape)[1], 0) if factors is None else factors.v
        bases.append(torch.linalg.qr(v).Q.float() if v.shape[1] else v.float())
    if not any(basis.shape[1] for basis in bases):
        raise InputError(f"no expert of the library changed {tensor!r}: there is nothing to route on")
    return tuple(bases)


@dataclass(frozen=True)
class NearestNeighbour:
    """A router by the most similar stored sample: w from the largest cosine with the support samples of each task.

    Args:
        tasks: Names of the experts.
        layer: The layer whose inputs are compared.
        support: For each task the stored samples, unit rows of shape (samples, width).
        source: The model of the first pass: the `"fixed"` merge or the `"base"`.
        normalize: `"zscore"` (default) or `"softmax"`.

    Example:
        >>> router = mg.routing.NearestNeighbour.fit("2", {"math": torch.randn(4, 16), "code": torch.randn(4, 16)})
    """

    tasks: tuple[str, ...]
    layer: str
    support: tuple[Tensor, ...]
    source: RoutingSource = "fixed"
    normalize: Normalize = DEFAULT

    def __post_init__(self) -> None:
        one_of("source", self.source, RoutingSource)
        one_of("normalize", self.normalize, Normalize)

    @classmethod
    def fit(
        cls, layer: str, support: Mapping[str, Tensor], source: RoutingSource = "fixed", normalize: Normalize = DEFAULT
    ) -> NearestNeighbour:
        """Build the router from some inputs of the layer for every task, each of shape (samples, width)."""
        _check_support(support)
        unit = tuple(F.normalize(z.float(), dim=1) for z in support.values())
        return cls(tuple(support), layer, unit, source, normalize)

    @property
    def layers(self) -> tuple[str, ...]:
        return (self.layer,)

    def weights(self, inputs: Mapping[str, Tensor]) -> Tensor:
        z = F.normalize(inputs[self.layer].float(), dim=1)
        nearest = torch.stack([(z @ rows.to(z).T).amax(1) for rows in self.support], dim=1)
        return normalized(nearest, self.normalize)


class MlpRouter(nn.Module):
    """A router with a two-layer perceptron on the inputs of a layer, trained on samples of every task.

    Args:
        tasks: Names of the experts.
        layer: The layer whose inputs the network reads.
        network: Maps inputs of shape (samples, width) to logits of shape (samples, tasks).
        source: The model of the first pass: the `"fixed"` merge or the `"base"`.

    Example:
        >>> support = {"math": torch.randn(4, 16), "code": torch.randn(4, 16)}
        >>> router = mg.routing.MlpRouter.fit("2", support, hidden=8, steps=5)
    """

    def __init__(self, tasks: tuple[str, ...], layer: str, network: nn.Module, source: RoutingSource = "fixed") -> None:
        super().__init__()
        one_of("source", source, RoutingSource)
        self.tasks, self.layer, self.source = tasks, layer, source
        self.network = network

    @classmethod
    def fit(
        cls,
        layer: str,
        support: Mapping[str, Tensor],
        source: RoutingSource = "fixed",
        *,
        hidden: int = 1024,
        dropout: float = 0.5,
        steps: int = 200,
        learning_rate: float = 1e-3,
        seed: int = 0,
    ) -> MlpRouter:
        """Train the network on inputs of the layer for every task: cross-entropy, AdamW, standardised inputs."""
        _check_support(support)
        x = torch.cat([z.float() for z in support.values()])
        y = torch.cat([torch.full((len(z),), task) for task, z in enumerate(support.values())])
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            network = nn.Sequential(
                _Standardize(x.mean(0), x.std(0, correction=0).clamp(min=1e-6)),
                nn.Linear(x.shape[1], hidden),
                nn.ReLU(),
                nn.Dropout(dropout),
                nn.Linear(hidden, len(support)),
            )
            optimiser = torch.optim.AdamW(network.parameters(), learning_rate)
            with torch.enable_grad():
                for _ in range(steps):
                    optimiser.zero_grad()
                    F.cross_entropy(network(x), y).backward()  # type: ignore[no-untyped-call]
                    optimiser.step()
        return cls(tuple(support), layer, network.eval().requires_grad_(False), source)

    @property
    def layers(self) -> tuple[str, ...]:
        return (self.layer,)

    def weights(self, inputs: Mapping[str, Tensor]) -> Tensor:
        logits: Tensor = self.network(inputs[self.layer].to(next(self.network.parameters())))
        return logits.softmax(dim=1)


class _Standardize(nn.Module):
    mean: Tensor
    spread: Tensor

    def __init__(self, mean: Tensor, spread: Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", mean)
        self.register_buffer("spread", spread)

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.spread


def check_router(router: Router, library: Library, layers: Mapping[str, Layer]) -> Router:
    """Return the router; refuse one that names unknown experts or layers, or reads inputs of another width."""
    if unknown := [task for task in router.tasks if task not in library]:
        known = f"the library has {', '.join(library.experts)}"
        raise InputError(f"the router was built for {unknown[0]!r}, but {known}; rebuild the router")
    if not router.tasks or not router.layers:
        raise InputError("a router needs at least one task and one layer")
    if away := [layer for layer in router.layers if layer not in layers]:
        known = did_you_mean(away[0], layers)
        raise InputError(
            f"the router reads {away[0]!r}, which is not a linear layer or convolution of the module{known}"
        )
    one_of("source", router.source, RoutingSource)
    read = {layer: input_width(layers[layer]) for layer in router.layers}
    try:
        found = list(router.weights({layer: torch.zeros(1, width) for layer, width in read.items()}).shape)
    except (RuntimeError, ValueError) as error:
        raise InputError(f"the router cannot read the layers' inputs, of widths {read}: {error}") from None
    if found != [1, len(router.tasks)]:
        raise InputError(f"the router gives weights of shape {found} for one sample and {len(router.tasks)} tasks")
    return router


def _check_support(support: Mapping[str, Tensor]) -> None:
    if not support:
        raise InputError("no support: give some inputs of the layer for every task")
    for task, z in support.items():
        if z.dim() != 2 or len(z) == 0:
            raise InputError(f"the support of task {task!r} has shape {list(z.shape)}; expected (samples, width)")
    widths = {task: z.shape[1] for task, z in support.items()}
    if len(set(widths.values())) > 1:
        raise InputError(f"the support has inputs of several widths, {widths}; give those of one layer")
