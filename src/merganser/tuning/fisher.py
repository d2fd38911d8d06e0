"""Diagonal Fisher information from per-example gradients: the weights of Fisher merging."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.utils._pytree import tree_map

from merganser.errors import InputError, one_of
from merganser.modules.batches import (
    Batch,
    InputsLike,
    arguments,
    drop_targets,
    explain_input_errors,
    find_first_tensor,
    require_several,
    require_targets,
)
from merganser.modules.functional import Head, Weights, call, evaluation_copy
from merganser.tuning.statistics import Statistics

Labels: TypeAlias = Literal["expected", "sampled", "given"]
Strategy: TypeAlias = Literal["auto", "vmap", "loop"]
_Gradients: TypeAlias = Callable[[dict[str, Tensor], InputsLike, Tensor], dict[str, Tensor]]


def diagonal_fisher(
    module: nn.Module,
    batches: Iterable[InputsLike] | Iterable[Batch],
    *,
    weights: Weights | None = None,
    labels: Labels = "expected",
    strategy: Strategy = "auto",
    chunk: int = 16,
    seed: int = 0,
    head: Head | None = None,
) -> Statistics:
    """Compute the diagonal Fisher information F = (1/N) Σ_n E_y (∂ log p(y | x_n) / ∂θ)².

    Squares are taken per example and then averaged, which differs from the square of a batch gradient. p is the softmax
    of the module's output, or of what `head` makes of it. Sequence outputs of shape (samples, positions, classes) sum
    log p over positions.

    Args:
        module: The network; it is not changed.
        batches: Inputs, or pairs of (inputs, targets). Targets count only with `labels="given"`.
        weights: The weights at which to evaluate the gradients; by default the module's.
        labels: The source of y: `"expected"` is the exact expectation over the model's own distribution, with one
            gradient per class; `"sampled"` draws one label per sample from it (many classes, sequences of tokens);
            `"given"` takes the targets (the empirical Fisher).
        strategy: `"vmap"` computes `chunk` examples at once, `"loop"` one; `"auto"` uses the loop where the module
            cannot be vectorised.
        chunk: Examples per vectorised step.
        seed: Seed of the sampled labels.
        head: The classifier of an encoder, held fixed.

    Returns:
        Statistics for the method `fisher`; `save` writes them.

    Raises:
        InputError: If there are no batches, or outputs and targets do not fit.

    Example:
        >>> fisher = mg.tuning.diagonal_fisher(math, batches)
        >>> fisher.samples
        12
    """
    one_of("labels", labels, Labels)
    one_of("strategy", strategy, Strategy)
    copied = evaluation_copy(module, weights)
    point = {name: p.detach() for name, p in copied.named_parameters() if p.requires_grad}
    sums = {name: torch.zeros_like(p, dtype=_wide(p.dtype)) for name, p in point.items()}
    generator = torch.Generator().manual_seed(seed)
    fixed = _freeze(head)
    squares = _Squares(copied, fixed, strategy, chunk)
    samples = 0
    for batch in require_several(batches, "batches"):
        inputs, given = require_targets(batch) if labels == "given" else (drop_targets(copied, batch), None)
        with torch.no_grad(), explain_input_errors(copied, *arguments(inputs)):
            log_p = _log_softmax(fixed(call(copied, point, inputs)))
        if log_p.isnan().any():
            raise InputError("the outputs are not numbers: look for NaN or infinity in the batches")
        samples += log_p.shape[0]
        for targets, share in _targets(log_p, labels, given, generator):
            for name, value in squares(point, inputs, targets, share).items():
                sums[name] += value
    if not samples:
        raise InputError("no batches: the Fisher information needs at least one example")
    return Statistics("fisher", {name: total / samples for name, total in sums.items()}, samples)


class _Squares:
    """Σ_n share_n · (∂ log p(y_n | x_n))² over a batch, vectorised as long as the module allows it."""

    def __init__(self, module: nn.Module, head: Head, strategy: Strategy, chunk: int) -> None:
        self.vectorise = strategy != "loop"
        self.fall_back = strategy == "auto"
        self.chunk = chunk

        def log_likelihood(weights: dict[str, Tensor], inputs: InputsLike, target: Tensor) -> Tensor:
            single = tree_map(lambda x: x.unsqueeze(0), inputs)
            log_p = _log_softmax(head(call(module, weights, single))).squeeze(0)
            return log_p.gather(-1, target.unsqueeze(-1)).sum()

        self.gradient = cast(_Gradients, grad(log_likelihood))

    def __call__(
        self, point: dict[str, Tensor], inputs: InputsLike, targets: Tensor, share: Tensor
    ) -> dict[str, Tensor]:
        if self.vectorise:
            try:
                return self._compute_vectorised(point, inputs, targets, share)
            except RuntimeError:
                if not self.fall_back:
                    raise
                self.vectorise = False  # the loop reports errors of the inputs again
        return self._compute_in_loop(point, inputs, targets, share)

    def _compute_vectorised(
        self, point: dict[str, Tensor], inputs: InputsLike, targets: Tensor, share: Tensor
    ) -> dict[str, Tensor]:
        per_example = vmap(self.gradient, in_dims=(None, 0, 0))
        totals: dict[str, Tensor] = {}
        for start in range(0, len(targets), self.chunk):
            part = slice(start, start + self.chunk)
            gradients = per_example(point, _select(inputs, part), targets[part])
            for name, value in gradients.items():
                weighted = torch.tensordot(share[part].to(_wide(value.dtype)), value.to(_wide(value.dtype)).square(), 1)
                totals[name] = totals[name] + weighted if name in totals else weighted
        return totals

    def _compute_in_loop(
        self, point: dict[str, Tensor], inputs: InputsLike, targets: Tensor, share: Tensor
    ) -> dict[str, Tensor]:
        totals = {name: torch.zeros_like(p, dtype=_wide(p.dtype)) for name, p in point.items()}
        for index in range(len(targets)):
            gradients = self.gradient(point, _select(inputs, index), targets[index])
            for name, value in gradients.items():
                totals[name].add_(value.to(totals[name].dtype).square(), alpha=float(share[index]))
        return totals


def _freeze(head: Head | None) -> Head:
    """Return the head as a function of features alone, in evaluation mode if it is a module."""
    if head is None:
        return lambda output: output
    return evaluation_copy(head).requires_grad_(False) if isinstance(head, nn.Module) else head


def _targets(
    log_p: Tensor, labels: Labels, given: Tensor | None, generator: torch.Generator
) -> Iterable[tuple[Tensor, Tensor]]:
    """Yield label vectors for a batch, each with its weight per example."""
    size = log_p.shape[0]
    if labels == "expected":
        if log_p.dim() != 2:
            raise InputError(
                f"outputs of shape {tuple(log_p.shape)}: the expectation over all sequences is infeasible; "
                "use labels='sampled'"
            )
        for label in range(log_p.shape[1]):
            yield torch.full((size,), label, device=log_p.device), log_p[:, label].exp()
        return
    if labels == "sampled":
        flat = log_p.exp().reshape(-1, log_p.shape[-1]).cpu()
        given = torch.multinomial(flat, 1, generator=generator).reshape(log_p.shape[:-1]).to(log_p.device)
    assert given is not None
    if given.shape != log_p.shape[:-1]:
        raise InputError(f"targets of shape {tuple(given.shape)} for outputs of shape {tuple(log_p.shape)}")
    yield given, torch.ones(size, device=log_p.device)


def _select(inputs: InputsLike, index: int | slice) -> Any:
    size = find_first_tensor(inputs).shape[0]

    def pick(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.shape[:1] != (size,):
            raise InputError(
                f"per-example gradients need inputs that are tensors with the batch axis first, size {size}"
            )
        return value[index]

    return tree_map(pick, inputs)


def _log_softmax(logits: Tensor) -> Tensor:
    return logits.to(_wide(logits.dtype)).log_softmax(-1)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
