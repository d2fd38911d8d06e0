"""Estimate what merging two experts costs, from a few unlabelled inputs of each task.

On task i, a merge θ loses L_i(θ) − L_i(θ_i). No labels are needed to see most of it: the expert's own answers stand in
for them, and the share of inputs that the mean of a pair, (θ_i + θ_j)/2, answers otherwise bounds what it can lose.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch

from merganser.checkpoints.opening import Reference
from merganser.checkpoints.opening import open as open_checkpoint
from merganser.errors import InputError
from merganser.modules.functional import combine
from merganser.plain import Result
from merganser.tuning.held_out import Data, Models, TaskHeads, label, match, match_heads, require_module
from merganser.tuning.pseudo_labels import pseudo_label
from merganser.tuning.validation import Validation

#: The share of accuracy lost per share of inputs with another answer, and the spread of losses around that line: least
#: squares over 28 pairs of text experts and 21 of an MLP (`benchmarks.mergeability`).
SLOPE, SPREAD = 0.76, 0.034


@dataclass(frozen=True)
class PairLoss(Result):
    """What the mean of two experts is expected to lose.

    Attributes:
        experts: The two experts.
        disagreement: The share of inputs of each one's task that the mean answers otherwise than the expert.
        loss: The expected share of their accuracy that is lost, mean over both tasks.
        error: The standard error of the loss: of the few inputs, and of the line from disagreement to loss.
    """

    experts: tuple[str, str]
    disagreement: tuple[float, float]
    loss: float
    error: float


@dataclass(frozen=True)
class PairLosses(Result):
    """All pairs of experts, the most costly first.

    Attributes:
        pairs: The pairs.
        by_expert: The mean loss over the pairs of each expert.
    """

    pairs: tuple[PairLoss, ...]
    by_expert: dict[str, float]

    @property
    def worst(self) -> PairLoss:
        """The pair that loses most."""
        return self.pairs[0]


@torch.no_grad()
def pair_losses(models: Models, base: Reference, data: Data, *, heads: TaskHeads | None = None) -> PairLosses:
    """Estimate what every pair of experts loses by merging, and rank the pairs.

    Every pair is averaged in memory and run on the inputs of its two tasks. With 256 inputs of each task, the estimate
    had a rank correlation of 0.91 with the measured losses of 28 pairs of text experts and of 0.90 with those of 21
    pairs of MLP experts. Other methods than the mean lose other amounts, and rank pairs less alike.

    Args:
        models: Two or more experts: checkpoints, state dicts or modules, in a list or by label.
        base: The module they were fine-tuned from, or any module of their architecture; it is not changed.
        data: Unlabelled batches for each model, in a list or by label.
        heads: For each model, a function from the module's output to its task's logits.

    Returns:
        The pairs, the most costly first.

    Raises:
        InputError: If there are fewer than two models, or data, heads and models do not match.

    Example:
        >>> found = mg.analysis.pair_losses.pair_losses(experts, base, {"math": batches, "code": batches})
        >>> found.worst.experts, found.worst.loss
    """
    named = label(models)
    if len(named) < 2:
        raise InputError(f"expected two or more experts to compare in pairs, got {len(named)}")
    module = require_module(base, "base")
    answers = pseudo_label(models, base, data, heads=heads)
    batches = match(answers, models, "data")
    agreement = Validation(module, batches, match_heads(heads, models))
    samples = {name: range(count) for name, count in agreement.counts().items()}
    states = {name: open_checkpoint(model).state_dict() for name, model in named.items()}
    pairs = []
    for pair in itertools.combinations(named, 2):
        mean = combine([states[name] for name in pair], [0.5, 0.5])
        found = agreement.answers(mean, {name: samples[name] for name in pair})
        pairs.append(_expect_loss(pair, [[1 - share for share in found[name]] for name in pair]))
    pairs.sort(key=lambda pair: -pair.loss)
    return PairLosses(
        tuple(pairs),
        {name: math.fsum(pair.loss for pair in pairs if name in pair.experts) / (len(named) - 1) for name in named},
    )


def _expect_loss(experts: tuple[str, str], differs: list[list[float]]) -> PairLoss:
    """Return the expected loss of a pair from which answers differ, by task."""
    shares = [math.fsum(own) / len(own) for own in differs]
    # One more equal and one more different answer, so that few inputs without a difference are not certain.
    smoothed = [(share * len(own) + 1) / (len(own) + 2) for share, own in zip(shares, differs, strict=True)]
    variance = math.fsum(s * (1 - s) / (len(own) + 2) for s, own in zip(smoothed, differs, strict=True)) / 4
    error = math.hypot(SLOPE * math.sqrt(variance), SPREAD)
    return PairLoss(experts, (shares[0], shares[1]), SLOPE * math.fsum(shares) / 2, error)
