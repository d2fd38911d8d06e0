"""ACE-Merging: a regression on inputs whose covariance is estimated from the task matrices."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from merganser.checkpoints.base import TensorSpec
from merganser.kernels.spectra import top_svd
from merganser.lazy import torch
from merganser.methods.matrices import MatrixRule, WeightedDeltas, matrix_shape
from merganser.methods.parameters import param
from merganser.methods.registry import register

if TYPE_CHECKING:
    from torch import Tensor


@register
@dataclass(frozen=True)
class ACE(MatrixRule):
    """M = (Σ_t Δ_t (C_t + ρI)) (Σ_t (C_t + ρI) + 1cᵀ)⁻¹, C_t the covariance of the rows of Δ_t, cᵀ the mean row of ΣC_t

    Fine-tuning moves the rows of a matrix along the inputs it sees. Their covariance approximates that of the inputs,
    so the least-squares merge of RegMean needs no data. All other tensors are averaged.

    If γ = Var_t(log ‖Δ_t‖²) / Mean_t(log ‖Δ_t‖²)² exceeds `threshold`, the tasks differ so much in size that each C_t +
    ρI is divided by tr C_t, and the solution is refined: R = M + Σ_t Δ_t (C_t − mean C) adds its top
    ⌊`refined_fraction`·n⌋ singular directions at their mean singular value. `normalize` overrides this decision.

    Xu et al. 2026, ACE-Merging (arXiv:2603.02945). The paper sets the ridge per family of models, from 1e-5 to 4e-2;
    here ρ = `epsilon` · mean_t tr C_t / columns, independent of the size of the weights. Unlike in the authors' code,
    and as in the paper, Δ_t is not centred in the numerator, and the prior is not divided by a trace.
    """

    name = "ace"
    summary = "least-squares merge with input covariances estimated from the task matrices, data-free"

    epsilon: float = param(1e-2, "ridge, relative to the mean variance of an input", low=1e-9)
    normalize: Literal["auto", "always", "never"] = param(
        "auto", "divide covariances by their traces and refine the spectrum", choices=("auto", "always", "never")
    )
    threshold: float = param(0.3, "heterogeneity γ above which `auto` normalises", low=0)
    refined_fraction: float = param(0.3, "share of the singular directions to refine", low=0, high=1)

    def combine(self, deltas: WeightedDeltas) -> Tensor:
        sizes = [float(delta.double().square().sum()) for delta in deltas]
        traces = [float(_centred(delta).square().sum()) for delta in deltas]
        if not any(traces):
            return torch.stack([delta.double() for delta in deltas]).mean(dim=0).to(deltas.dtype)
        normalized = self.normalize == "always" or (self.normalize == "auto" and _unlike(sizes) > self.threshold)
        columns = deltas.shape[1]
        ridge = self.epsilon * statistics.fmean(traces) / columns
        pull = deltas.zeros(torch.float64)
        whole = pull.new_zeros(columns, columns)
        for delta, covariance, divisor in self._covariances(deltas, traces, normalized):
            whole += covariance
            pull += delta @ covariance + (ridge / divisor) * delta
        ridges = sum(ridge / (trace if normalized and trace else 1.0) for trace in traces)
        merged = _solve(pull, whole, ridges)
        if normalized and (k := int(self.refined_fraction * min(deltas.shape) + 1e-9)):
            mean = whole / len(deltas)
            parts = (delta @ (own - mean) for delta, own, _ in self._covariances(deltas, traces, normalized))
            top = top_svd(sum(parts, merged), k)
            merged += top.s.mean() * (top.u @ top.v.T) if top.rank else 0
        return merged.to(deltas.dtype)

    def _covariances(
        self, deltas: WeightedDeltas, traces: Sequence[float], normalized: bool
    ) -> Iterator[tuple[Tensor, Tensor, float]]:
        """Yield every Δ_t, its covariance, and the divisor of the covariance."""
        for delta, trace in zip(deltas, traces, strict=True):
            divisor = trace if normalized and trace else 1.0
            rows = _centred(delta)
            yield delta.double(), rows.T @ rows / divisor, divisor

    def scratch(self, spec: TensorSpec, models: int) -> int:
        """Return the memory of squares of the input side, besides a few matrices."""
        columns = matrix_shape(spec.shape)[1]
        return 8 * (6 * spec.numel + 5 * columns * columns)


def _centred(delta: Tensor) -> Tensor:
    wide = delta.double()
    return wide - wide.mean(dim=0)


def _unlike(sizes: Sequence[float]) -> float:
    """Return γ of the nonzero task matrices; 0 for fewer than two."""
    logarithms = [math.log(size) for size in sizes if size > 0]
    if len(logarithms) < 2:
        return 0.0
    spread, mean = statistics.variance(logarithms), statistics.fmean(logarithms)
    return spread / mean**2 if mean else math.inf if spread else 0.0


def _solve(pull: Tensor, whole: Tensor, ridge: float) -> Tensor:
    """Return P (W + ρI + 1cᵀ)⁻¹ with cᵀ the mean row of W, by the Sherman–Morrison formula.

    W + ρI is positive definite and commutes with W, so 1 + cᵀ (W + ρI)⁻¹ 1 is at least 1.
    """
    prior = whole.mean(dim=0)
    regular = whole + ridge * torch.eye(len(whole), dtype=whole.dtype, device=whole.device)
    factor = torch.linalg.cholesky_ex(regular).L  # of task matrices that overflowed it is NaN, not an exception
    both = torch.cholesky_solve(torch.cat([pull.T, torch.ones_like(prior)[:, None]], dim=1), factor)
    solved, ones = both[:, :-1].T, both[:, -1]
    weights = torch.cholesky_solve(prior[:, None], factor)[:, 0]
    return solved - torch.outer(solved.sum(dim=1), weights) / (1 + prior @ ones)
