"""The bound on ‖C‖ for feed-forward classifiers under cross-entropy.

Network: f(x) = W_L φ(W_{L−1} … φ(W_1 x + b_1) …) + b_L with ‖W_ℓ‖₂ ≤ s_ℓ, ‖x‖₂ ≤ M_x, |φ'| ≤ β, |φ''| ≤ γ, Π = Π_ℓ s_ℓ.
Derivations are in docs/theory.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse.linalg import LinearOperator, eigsh
from torch import Tensor, nn

from merganser.analysis.gradients.expansion import curvature_term, joint_path
from merganser.analysis.gradients.losses import TaskLosses
from merganser.errors import InputError
from merganser.modules.batches import find_first_tensor
from merganser.plain import Result

_ACTIVATIONS: dict[type[nn.Module], tuple[float, float, float]] = {
    nn.Identity: (1.0, 0.0, 0.0),
    nn.ReLU: (1.0, 0.0, 0.0),
    nn.Tanh: (1.0, 4 / (3 * math.sqrt(3)), 0.0),
    nn.Sigmoid: (0.25, 1 / (6 * math.sqrt(3)), 0.5),
    nn.SiLU: (1.0999, 0.5, 0.0),
    nn.GELU: (1.1291, 0.7980, 0.0),
}
"""sup |φ'|, sup |φ''| (almost everywhere) and |φ(0)| with default arguments."""


@dataclass(frozen=True)
class NetworkConstants(Result):
    """The assumptions of the theorem about a feed-forward network, everywhere along a path."""

    spectral_norms: tuple[float, ...]
    """s_1 … s_L."""
    input_norm: float
    """M_x."""
    slope: float
    """β."""
    curvature: float
    """γ."""
    at_zero: float = 0.0
    """|φ(0)|."""
    widths: tuple[int, ...] = ()
    """Hidden widths, needed where φ(0) ≠ 0."""
    bias_norms: tuple[float, ...] | None = None
    """‖b_1‖ … ‖b_L‖, or None for a network without biases, as in the theorem."""

    @property
    def product(self) -> float:
        """Return Π."""
        return math.prod(self.spectral_norms)

    @property
    def depth(self) -> int:
        """Return L."""
        return len(self.spectral_norms)


@dataclass(frozen=True)
class Bound(Result):
    """‖C‖ ≤ task_factor · hessian · gradient."""

    task_factor: float
    hessian: float
    gradient: float

    @property
    def total(self) -> float:
        """Return the product."""
        return self.task_factor * self.hessian * self.gradient


def curvature_bound(constants: NetworkConstants, *, tasks: int, alpha: float, epochs: int) -> Bound:
    """Return ‖C‖ ≤ T · C(k, 2) · (|α|(T − 1) + |1 − α|) · H · G with G = √2 P_L and H = ½P_L² + √2 Q_L.

    P and Q bound the first and second derivative of the pre-activations h_ℓ in the weights, A their inputs a_ℓ:

        A_0 = M_x,  A_ℓ = β(s_ℓ A_{ℓ−1} + ‖b_ℓ‖) + |φ(0)|√width_ℓ
        P_ℓ² = A_{ℓ−1}² [+ 1 with biases] + (s_ℓ β P_{ℓ−1})²
        Q_ℓ = β P_{ℓ−1} + s_ℓ (γ P_{ℓ−1}² + β Q_{ℓ−1})

    Args:
        constants: The constants of the network.
        tasks: T.
        alpha: α.
        epochs: k.
    """
    first, second = derivative_bounds(constants)
    return Bound(
        task_factor=tasks * math.comb(epochs, 2) * (abs(alpha) * (tasks - 1) + abs(1 - alpha)),
        hessian=first**2 / 2 + math.sqrt(2) * second,
        gradient=math.sqrt(2) * first,
    )


def derivative_bounds(constants: NetworkConstants) -> tuple[float, float]:
    """Return (P_L, Q_L), bounds on ‖∂f/∂θ‖ and on ‖∂²f/∂θ²‖ as a bilinear map, for one input.

    Args:
        constants: The constants of the network.
    """
    beta, gamma = constants.slope, constants.curvature
    bias_unit = 0.0 if constants.bias_norms is None else 1.0
    biases = constants.bias_norms or (0.0,) * constants.depth
    if constants.at_zero and len(constants.widths) < constants.depth - 1:
        raise InputError("an activation with φ(0) ≠ 0 needs the hidden widths")
    inputs, first, second = constants.input_norm, 0.0, 0.0
    for layer, norm in enumerate(constants.spectral_norms):
        second = beta * first + norm * (gamma * first**2 + beta * second)
        first = math.sqrt(inputs**2 + bias_unit + (norm * beta * first) ** 2)
        if layer < constants.depth - 1:
            inputs = beta * (norm * inputs + biases[layer])
            inputs += constants.at_zero * math.sqrt(constants.widths[layer]) if constants.at_zero else 0.0
    return first, second


def network_constants(losses: TaskLosses, path: Iterable[Tensor]) -> NetworkConstants:
    """Return constants of an `nn.Sequential` of Linear layers and known activations, the largest along `path` and
    the data.

    Args:
        losses: The losses, whose module and data are measured.
        path: Weights, each as a flat vector.
    """
    linears, activations = _layers(losses.module)
    states = [losses.layout.unpack(theta) for theta in path]
    fixed = dict(losses.module.named_parameters())

    def largest(name: str, order: int | None) -> float:
        values = [state.get(name, fixed[name]).detach().double() for state in states]
        return max(float(torch.linalg.norm(value, order)) for value in values)

    inputs = [find_first_tensor(batch[0]) for batches in losses.data.values() for batch in batches]
    has_bias = [name for name, layer in linears if layer.bias is not None]
    constants = [_constants(activation) for activation in activations] or [(1.0, 0.0, 0.0)]
    return NetworkConstants(
        spectral_norms=tuple(largest(f"{name}.weight", 2) for name, _ in linears),
        input_norm=max(float(x.flatten(1).double().norm(dim=1).max()) for x in inputs),
        slope=max(c[0] for c in constants),
        curvature=max(c[1] for c in constants),
        at_zero=max(c[2] for c in constants),
        widths=tuple(layer.out_features for _, layer in linears[:-1]),
        bias_norms=tuple(largest(f"{name}.bias", None) if name in has_bias else 0.0 for name, _ in linears)
        if has_bias
        else None,
    )


def hessian_norm(losses: TaskLosses, task: str, theta: Tensor) -> float:
    """Return ‖∇²L̄_t(θ)‖₂ by Lanczos on Hessian-vector products.

    Args:
        losses: The losses of the tasks.
        task: The name of a task.
        theta: Weights, as a flat vector.
    """

    def product(vector: NDArray[np.float64]) -> NDArray[np.float64]:
        direction = torch.from_numpy(np.ascontiguousarray(vector.reshape(-1))).to(theta)
        return np.asarray(losses.hvp(task, theta, direction).double().cpu().numpy())

    size = theta.numel()
    start = np.random.default_rng(0).standard_normal(size)
    if size == 1 or not product(start).any():  # Lanczos needs two dimensions, and a start that does not vanish
        return float(abs(product(np.ones(size))).max())
    operator = LinearOperator((size, size), matvec=product, dtype=np.float64)
    return float(abs(eigsh(operator, k=1, which="LM", v0=start, tol=1e-8, return_eigenvectors=False)[0]))


@dataclass(frozen=True)
class BoundCheck(Result):
    """The measured ‖C‖ with its bound, and the largest gradient and Hessian norms on the joint path."""

    measured: float
    measured_gradient: float
    measured_hessian: float
    bound: Bound
    constants: NetworkConstants

    @property
    def holds(self) -> bool:
        """Return whether the bound covers the measurement; it must."""
        return self.measured <= self.bound.total


def check_bound(losses: TaskLosses, *, eta: float, alpha: float, epochs: int) -> BoundCheck:
    """Measure ‖C‖ after `epochs` of joint descent, and its bound. The loss must be cross-entropy.

    Args:
        losses: The losses of the tasks, and the weights that all runs start from.
        eta: η, the step size of the experts.
        alpha: α, the scale of the task vectors.
        epochs: k, the number of steps.
    """
    if epochs < 1:
        raise InputError(f"epochs must be at least 1, got {epochs}")
    joint = joint_path(losses, eta, alpha, epochs)
    inner = joint[:epochs]  # C has gradients at θ⁽⁰⁾ … θ⁽ᵏ⁻²⁾ and Hessians at θ⁽¹⁾ … θ⁽ᵏ⁻¹⁾
    constants = network_constants(losses, inner)
    return BoundCheck(
        measured=float(curvature_term(losses, joint, alpha).norm()),
        measured_gradient=max(float(losses.gradient(t, theta).norm()) for t in losses.tasks for theta in inner),
        measured_hessian=max(hessian_norm(losses, t, theta) for t in losses.tasks for theta in inner),
        bound=curvature_bound(constants, tasks=len(losses.tasks), alpha=alpha, epochs=epochs),
        constants=constants,
    )


def _layers(module: nn.Module) -> tuple[list[tuple[str, nn.Linear]], list[nn.Module]]:
    if not isinstance(module, nn.Sequential):
        raise InputError("the bound is for feed-forward networks; expected an nn.Sequential of Linear and activations")
    children = [(n, m) for n, m in module.named_children() if not isinstance(m, (nn.Flatten, nn.Dropout))]
    linears = [(name, layer) for name, layer in children if isinstance(layer, nn.Linear)]
    others = [layer for _, layer in children if not isinstance(layer, nn.Linear)]
    if not linears or not isinstance(children[-1][1], nn.Linear):
        raise InputError("the last layer must be Linear: its outputs are the logits of the cross-entropy")
    return linears, others


def _constants(activation: nn.Module) -> tuple[float, float, float]:
    if isinstance(activation, nn.Softplus):  # log(1 + exp(βx)) / β
        return 1.0, activation.beta / 4, math.log(2) / activation.beta
    if type(activation) not in _ACTIVATIONS:
        known = ", ".join(kind.__name__ for kind in (*_ACTIVATIONS, nn.Softplus))
        raise InputError(
            f"no derivative bounds for {type(activation).__name__}; known: {known}. "
            "Give NetworkConstants to curvature_bound yourself."
        )
    return _ACTIVATIONS[type(activation)]
