"""Twin-Merging: a shared expert, and what is left of each expert, mixed by a trained router."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from merganser.errors import InputError, one_of
from merganser.kernels.spectra import top_svd
from merganser.library.library import Library
from merganser.modules.activations import Pooling, capture, matrix_layers
from merganser.modules.inputs import Inputs
from merganser.routing.baselines.base import check_at_least_one
from merganser.routing.baselines.gated import GatedBaseline, Gates
from merganser.routing.composition import Composition, applied
from merganser.routing.gating import ExpertStack, bias_updates, stack_experts
from merganser.routing.heads import HeadLike, HeadScore
from merganser.routing.models import Features
from merganser.routing.routers import Router, check_router


class TwinMerging(GatedBaseline):
    """A shared expert plus what is left of each expert, mixed by a trained router (Twin-Merging).

    W = W_s + Σ_t w_t U_t Σ_t V_tᵀ with the shared expert θ_s (task arithmetic) and the low-rank residuals
    U_t Σ_t V_tᵀ = SVD_r(θ_t − θ_s), mixed for every sample by the weights w of the router. They also vote for the task.

    Args:
        module: The network. It must hold the base's weights.
        library: The experts.
        heads: The classification head of every expert, by its name.
        router: Reads the shared expert; its `source` has no effect.
        scale: λ of the shared expert.
        rank: Rank of the residuals; by default the share 1/T of each matrix.
        features: Turns the module's output and inputs into what the heads read, shape (samples, width). Needed
            unless the output itself has this shape.
        pooling: How the tokens of a layer's input become one vector.
        score: How answers of different heads are compared: `"logit"`, `"probability"` or `"posterior"`.

    Example:
        >>> router = mg.routing.ProjectionRouter.of(library, "2")
        >>> model = mg.routing.TwinMerging(encoder, library, heads, router=router)
    """

    def __init__(
        self,
        module: nn.Module,
        library: Library,
        heads: Mapping[str, HeadLike],
        *,
        router: Router,
        scale: float = 0.3,
        rank: int | None = None,
        features: Features | None = None,
        pooling: Pooling = "mean",
        score: HeadScore = "logit",
    ) -> None:
        one_of("pooling", pooling, Pooling)
        if router.tasks != library.experts:
            raise InputError(f"the router's tasks {list(router.tasks)} are not the library's {list(library.experts)}")
        if rank is not None:
            check_at_least_one("rank", rank)
        super().__init__(module, library, heads, features=features, score=score)
        self.pooling: Pooling = pooling
        self.scale, self.rank = scale, rank
        self.router = check_router(router, library, matrix_layers(module))
        self.derive()

    def derive(self) -> None:
        self.shared = self.rest = self.averaged(self.scale)
        self.stacks = {layer: self._residuals(layer) for layer in stack_experts(self.library, self.module)}

    def _residuals(self, layer: str) -> ExpertStack:
        name = f"{layer}.weight"
        weight = self.composer.tensors[name].detach()
        common = self.shared.whole[name] - weight
        k = self.rank or max(1, min(weight.shape) // len(self.library))
        experts = [self.library.expert(task) for task in self.library.experts]
        factors = [top_svd(expert.delta(name) - common.cpu(), k) for expert in experts]
        bias = bias_updates(self.library, f"{layer}.bias", weight)
        return ExpertStack.of(factors, weight, None if bias is None else bias - self.scale * bias.sum(0))

    def ungated(self) -> Composition:
        return self.shared

    def open_gates(self, inputs: Inputs) -> Gates:
        with applied(self.module, self.shared), torch.no_grad():
            seen = capture(self.module, inputs, self.router.layers, self.pooling)
        return _RouterGates(self.router.weights(seen.inputs).float())


class _RouterGates(Gates):
    def __init__(self, weights: Tensor) -> None:
        self._weights = weights

    def __call__(self, layer: str, x: Tensor) -> Tensor:
        return self._weights.to(x)

    def votes(self) -> Tensor:
        return self._weights
