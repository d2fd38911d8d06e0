"""Signals of pairs of experts from a few unlabelled inputs of each task.

What a merge loses on task i is L_i(θ) − L_i(θ_i). Labels are not needed to estimate it: where the expert is right, the
merge is wrong if it answers otherwise, so the expert's own answers stand in for the labels. At θ = θ_0 + ½(τ_i + τ_j):

- `disagreement`: share of inputs that the mean of the pair answers otherwise than the expert of the task;
- `divergence`: KL(expert ‖ mean) of the class probabilities, in nats;
- `turned`: 1 − cosine of the changes of the logits from the base to the expert and to the mean.

And what is known before the other expert is:

- `halved`: share of inputs that θ_0 + ½τ_i answers otherwise than the expert: the cost of a shorter task vector;
- `base`: share of inputs that the base answers otherwise than the expert.

And to first order, from one gradient for each expert:

- `slope`: ⟨∇L_i(θ_i), ½(τ_j − τ_i)⟩, the change of the loss from the expert to the mean;
- `pull`: ⟨∇L_i(θ_0), τ_j⟩, the change of the loss of the base by the other expert's task vector;
- `alignment`: −cos(∇L_i(θ_0), τ_j).

All are means over the two tasks of a pair.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.experts import Classifiers, State, differences

Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class Probes:
    """What every expert makes of the inputs of its task, beside the base and the expert with half its task vector."""

    experts: Classifiers[Any]
    inputs: int
    accuracy: Mapping[str, float]
    expert: Mapping[str, Tensor]
    base: Mapping[str, Tensor]
    halved: Mapping[str, Tensor]
    gradients: Mapping[str, State]
    base_gradients: Mapping[str, State]

    @classmethod
    def of(cls, experts: Classifiers[Any], inputs: int) -> Probes:
        """Run the experts and the base on the first validation inputs of each task."""
        trained = experts.trained
        own, base, halved, gradients, base_gradients = {}, {}, {}, {}, {}
        for name, expert in experts.experts.items():
            own[name] = logits(experts, experts.whole(expert), name, inputs)
            base[name] = logits(experts, experts.base, name, inputs)
            half = experts.weights(differences(expert, trained), 0.5)
            halved[name] = logits(experts, half, name, inputs)
            answers = own[name].argmax(1)
            gradients[name] = gradient(experts, experts.whole(expert), name, answers)
            base_gradients[name] = gradient(experts, experts.base, name, answers)
        return cls(experts, inputs, experts.own_scores(experts.experts), own, base, halved, gradients, base_gradients)

    def disagreement(self, weights: Weights, names: Sequence[str]) -> float:
        """The share of inputs that a merge answers otherwise than the experts."""
        found = [share(self.expert[name], logits(self.experts, weights, name, self.inputs)) for name in names]
        return sum(found) / len(found)

    def signals(self, pair: tuple[str, str]) -> dict[str, float]:
        """The signals of a pair, means over its tasks."""
        sides = [self._side(pair[0], pair[1]), self._side(pair[1], pair[0])]
        return {name: (sides[0][name] + sides[1][name]) / 2 for name in sides[0]}

    def _side(self, own: str, other: str) -> dict[str, float]:
        """The signals on the task of one expert, of merging the other into it."""
        experts, trained = self.experts, self.experts.trained
        vectors = [differences(experts.experts[name], trained) for name in (own, other)]
        mean = {name: (a + vectors[1][name]) / 2 for name, a in vectors[0].items()}
        merged = logits(experts, experts.weights(mean), own, self.inputs)
        expert, base, slope = self.expert[own], self.base[own], self.base_gradients[own]
        pull = inner(slope, vectors[1])
        return {
            "disagreement": share(expert, merged),
            "divergence": float(
                F.kl_div(merged.log_softmax(1), expert.log_softmax(1), log_target=True, reduction="batchmean")
            ),
            "turned": 1 - float(F.cosine_similarity((expert - base).flatten(), (merged - base).flatten(), 0)),
            "halved": share(expert, self.halved[own]),
            "base": share(expert, base),
            "slope": inner(self.gradients[own], vectors[1]) / 2 - inner(self.gradients[own], vectors[0]) / 2,
            "pull": pull,
            "alignment": -pull / (inner(slope, slope) * inner(vectors[1], vectors[1])) ** 0.5,
        }


def share(expert: Tensor, other: Tensor) -> float:
    """The share of inputs with another answer."""
    return float((expert.argmax(1) != other.argmax(1)).double().mean())


@torch.no_grad()
def logits(experts: Classifiers[Any], weights: Weights, name: str, inputs: int) -> Tensor:
    """The logits of the first validation inputs of a task."""
    return experts.logits(experts.backbone(weights), name, range(inputs), "validation")


def gradient(experts: Classifiers[Any], weights: Weights, name: str, answers: Tensor) -> State:
    """The gradient of the mean cross-entropy with these answers, of the trained tensors."""
    backbone = experts.backbone(weights)
    found = {key: value for key, value in backbone.named_parameters() if key in experts.trained}
    loss = F.cross_entropy(experts.logits(backbone, name, range(len(answers)), "validation"), answers)
    return dict(zip(found, torch.autograd.grad(loss, list(found.values())), strict=True))


def inner(a: Weights, b: Weights) -> float:
    """The inner product of the tensors that both have."""
    return float(sum((a[name].double() * b[name].double()).sum() for name in a if name in b))
