"""What adaptivity is compared with, on the same library: static merges, the oracle, SMILE, WeMoE, Twin-Merging.

None of these names a head. Given the task, its head answers; otherwise the task that most gates vote for, or, where no
gate chooses, every head takes part and the best (task, class) wins.

Gates stand beside linear layers. A layer that turns out not to be called in a forward pass, since its weight is read
directly, counts with the other tensors from then on.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from merganser.errors import InputError, did_you_mean, one_of
from merganser.experts.activations import Pooling, capture, layer_of, linear_layers, pool
from merganser.experts.adaptive import Features
from merganser.experts.composition import Composer, Composition, applied
from merganser.experts.gating import Stack, bias_updates, gated, stacks
from merganser.experts.heads import Head, Heads, Prediction, Score, default_features
from merganser.experts.inputs import Inputs
from merganser.experts.library import Library
from merganser.experts.routing import Router, checked
from merganser.kernels.spectra import top_svd


class Baseline(ABC):
    """A model over a library that answers with one of its heads."""

    def __init__(
        self,
        module: nn.Module,
        library: Library,
        heads: Mapping[str, Head],
        *,
        features: Features | None = None,
        pooling: Pooling = "mean",
        score: Score = "logit",
    ) -> None:
        one_of("pooling", pooling, Pooling)
        one_of("score", score, Score)
        self.module = module
        self.library = library
        self.heads = Heads(heads, library.experts)
        self.composer = Composer(module, library, {}, load_base=False)
        self.features = features or (lambda output, inputs: default_features(output))
        self.pooling: Pooling = pooling
        self.score: Score = score

    @abstractmethod
    def run(self, inputs: Inputs) -> tuple[Any, Tensor | None]:
        """The module's output, and votes for the tasks (samples × tasks) if the method chooses among them."""

    @torch.no_grad()
    def predict(self, batch: Any, task: str | None = None) -> Prediction:
        """Answers; with the head of `task` if it is given."""
        self._check(task)
        inputs = Inputs.of(batch)
        return self.answer(inputs, *self.run(inputs), task)

    @torch.no_grad()
    def answer(self, inputs: Inputs, output: Any, votes: Tensor | None, task: str | None = None) -> Prediction:
        """The same from what `run` gave."""
        self._check(task)
        tasks = self.library.experts
        if task is not None:
            votes = torch.tensor([[float(name == task) for name in tasks]]).expand(inputs.size, -1)
        if votes is None:
            sets = (frozenset(tasks),) * inputs.size
            votes = torch.full((inputs.size, len(tasks)), 1 / len(tasks))
        else:
            sets = tuple(frozenset([tasks[index]]) for index in votes.argmax(1).tolist())
        return self.heads.predict(self.features(output, inputs), sets, votes.cpu(), self.score)

    def _check(self, task: str | None) -> None:
        if task is not None and task not in self.library:
            raise InputError(f"no expert {task!r} in the library{did_you_mean(task, self.library.experts)}")

    def averaged(self, scale: float, among: Sequence[str] | None = None) -> Composition:
        """θ₀ + scale · Σ Δ_t of every changed tensor, or of some."""
        whole = {}
        experts = [self.library.expert(name) for name in self.library.experts]
        for name, stored in self.composer.stored.items():
            changed = [expert for expert in experts if stored in expert.file.kinds and expert.merges(stored)]
            if changed and (among is None or name in among):
                tensor = self.composer.tensors[name].detach()
                total = sum((expert.delta(stored) for expert in changed), torch.zeros(()))
                whole[name] = tensor + scale * total.to(tensor)
        return Composition(frozenset(self.library.experts), {}, whole)

    def apart_from(self, layers: Sequence[str]) -> list[str]:
        """Tensors that do not belong to `layers`."""
        theirs = {f"{layer}.{part}" for layer in layers for part in ("weight", "bias")}
        return [name for name in self.composer.stored if name not in theirs]


class Static(Baseline):
    """One merge for every input: TSV-Merge of the whole library, or task arithmetic θ₀ + λ ΣΔ_t."""

    def __init__(self, *args: Any, method: str = "tsv", scale: float | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        one_of("static method", method, ("task_arithmetic", "tsv"))
        if method == "tsv":
            composer = Composer(self.module, self.library, {"scale": 1.0 if scale is None else scale}, load_base=False)
            self.composition = composer.compose(frozenset(self.library.experts)).materialized(composer.tensors)
        else:
            self.composition = self.averaged(0.3 if scale is None else scale)

    def run(self, inputs: Inputs) -> tuple[Any, None]:
        with applied(self.module, self.composition):
            return inputs.run(self.module), None


class Oracle(Baseline):
    """The expert of the task, which has to be told: the limit for every router."""

    def run(self, inputs: Inputs) -> tuple[Any, None]:
        raise InputError("the oracle has to be told the task: predict(batch, task)")

    @torch.no_grad()
    def predict(self, batch: Any, task: str | None = None) -> Prediction:
        self._check(task)
        inputs = Inputs.of(batch)
        if task is None:
            return self.answer(inputs, *self.run(inputs))
        expert = self.composer.compose(frozenset([task])).materialized(self.composer.tensors)
        with applied(self.module, expert):
            output = inputs.run(self.module)
        return self.answer(inputs, output, None, task)


class Smile(Baseline):
    """SMILE: y = W₀ x + Σ_{t ∈ top} p_t U_t Σ_t V_tᵀ x in every linear layer, with p = softmax over the top tasks of
    ‖V_tᵀ x‖, V_t the first `gate_rank` singular vectors. Gates decide for every token and layer anew.

    Other tensors get the mean of their updates. Votes: in each layer the task most tokens chose, then the task most
    layers chose.
    """

    def __init__(self, *args: Any, top: int = 1, gate_rank: int = 16, **options: Any) -> None:
        super().__init__(*args, **options)
        _at_least_one("top", top)
        _at_least_one("gate_rank", gate_rank)
        self.top = min(top, len(self.library))
        self.stacks = stacks(self.library, self.module)
        self.gates = {layer: _leading(stack, gate_rank) for layer, stack in self.stacks.items()}
        self.rest = self._averaged_rest()

    def _averaged_rest(self) -> Composition:
        return self.averaged(1 / len(self.library), self.apart_from(list(self.stacks)))

    def run(self, inputs: Inputs) -> tuple[Any, Tensor]:
        votes = torch.zeros(inputs.size, len(self.library))

        def gate(layer: str, x: Tensor) -> Tensor:
            scores = torch.stack([(x @ v).norm(dim=-1) for v in self.gates[layer]], dim=-1)
            best = scores.topk(self.top, dim=-1)
            if x.shape[0] == inputs.size:
                votes[torch.arange(inputs.size), self._mode(best.indices[..., 0], inputs.mask)] += 1
            return torch.zeros_like(scores).scatter(-1, best.indices, best.values.softmax(dim=-1))

        with applied(self.module, self.rest), gated(self.module, self.stacks, gate) as uncalled:
            output = inputs.run(self.module)
        if uncalled:
            self.stacks = _without(self.stacks, uncalled)
            self.rest = self._averaged_rest()
            return self.run(inputs)
        return output, votes / votes.sum(1, keepdim=True).clamp(min=1)

    def _mode(self, chosen: Tensor, mask: Tensor | None) -> Tensor:
        chosen = chosen.reshape(chosen.shape[0], -1)
        counts = torch.nn.functional.one_hot(chosen, len(self.library)).cpu()
        if mask is not None and mask.shape == chosen.shape:
            counts = counts * mask.cpu()[..., None]
        return counts.sum(1).argmax(1)


class WeMoE(Baseline):
    """WeMoE: task arithmetic everywhere but in the MLPs, where W = W₀ + Σ_t g_t(z) Δ_t with a small gate per block.

    g is a two-layer perceptron of the block's mean input whose last bias starts at λ (0.3), so that it starts as task
    arithmetic. `fit` adapts the gates to unlabelled batches of the tasks by lowering the entropy of their heads'
    answers. The MLPs are the linear layers with unequal sides, unless `layers` names others. Coefficients mix, they do
    not choose: every head takes part.
    """

    def __init__(
        self, *args: Any, layers: Sequence[str] | None = None, scale: float = 0.3, seed: int = 0, **options: Any
    ) -> None:
        super().__init__(*args, **options)
        linears = linear_layers(self.module)
        if layers is None:
            chosen = [name for name, part in linears.items() if part.in_features != part.out_features]
        else:
            chosen = [layer_of(name, self.module) for name in layers]
        self.stacks = stacks(self.library, self.module, chosen)
        if not self.stacks:
            raise InputError("no layer for WeMoE to gate; name the linear layers of the MLPs")
        self.blocks = {layer: _block(layer) for layer in self.stacks}
        first: dict[str, str] = {}
        for layer, block in self.blocks.items():
            first.setdefault(block, layer)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.gates = {block: _gate(linears[layer], len(self.library), scale) for block, layer in first.items()}
        self.scale = scale
        self.rest = self._averaged_rest()

    def _averaged_rest(self) -> Composition:
        return self.averaged(self.scale, self.apart_from(list(self.stacks)))

    def run(self, inputs: Inputs) -> tuple[Any, None]:
        coefficients: dict[str, Tensor] = {}

        def gate(layer: str, x: Tensor) -> Tensor:
            block = self.blocks[layer]
            if block not in coefficients:
                coefficients[block] = self.gates[block](pool(x, self.pooling, inputs.mask))
            return coefficients[block]

        with applied(self.module, self.rest), gated(self.module, self.stacks, gate) as uncalled:
            output = inputs.run(self.module)
        if uncalled:
            self.stacks = _without(self.stacks, uncalled)
            self.rest = self._averaged_rest()
            return self.run(inputs)
        return output, None

    def fit(self, batches: Mapping[str, Sequence[Any]], steps: int = 50, rate: float = 1e-3) -> WeMoE:
        """One batch of every task a step, taken in turn."""
        optimiser = torch.optim.Adam([p for gate in self.gates.values() for p in gate.parameters()], rate)
        with torch.enable_grad():
            for step in range(steps):
                optimiser.zero_grad()
                for task, parts in batches.items():
                    inputs = Inputs.of(parts[step % len(parts)])
                    features = self.features(self.run(inputs)[0], inputs)
                    logits = self.heads.logits(task, features).log_softmax(dim=1)
                    entropy = -(logits.exp() * logits).sum(1).mean()
                    entropy.backward()  # type: ignore[no-untyped-call]
                optimiser.step()
        return self


class TwinMerging(Baseline):
    """Twin-Merging: a shared expert θ_s (task arithmetic) and exclusive low-rank residuals SVD_r(θ_t − θ_s), mixed for
    every sample by the weights of a trained router: W = W_s + Σ_t w_t U_t Σ_t V_tᵀ.

    `router` reads the shared expert (its `source` is not asked for). `rank` is that of the residuals, by default the
    share 1/T of each matrix. Votes: the router's weights.
    """

    def __init__(self, *args: Any, router: Router, scale: float = 0.3, rank: int | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        if router.tasks != self.library.experts:
            raise InputError(
                f"the router's tasks {list(router.tasks)} are not the library's {list(self.library.experts)}"
            )
        if rank is not None:
            _at_least_one("rank", rank)
        self.router = checked(router, self.library, linear_layers(self.module))
        self.shared = self.averaged(scale)
        self.stacks = {}
        for layer in stacks(self.library, self.module):
            name = f"{layer}.weight"
            weight = self.composer.tensors[name].detach()
            common = self.shared.whole[name] - weight
            k = rank or max(1, min(weight.shape) // len(self.library))
            experts = [self.library.expert(task) for task in self.library.experts]
            factors = [top_svd(expert.delta(name) - common.cpu(), k) for expert in experts]
            bias = bias_updates(self.library, f"{layer}.bias", weight)
            if bias is not None:
                bias = bias - scale * bias.sum(0)
            self.stacks[layer] = Stack.of(factors, weight, bias)

    def run(self, inputs: Inputs) -> tuple[Any, Tensor]:
        with applied(self.module, self.shared):
            with torch.no_grad():
                seen = capture(self.module, inputs, self.router.layers, self.pooling)
            weights = self.router.weights(seen.inputs).float()
            with gated(self.module, self.stacks, lambda layer, x: weights.to(x)) as uncalled:
                output = inputs.run(self.module)
        if uncalled:
            self.stacks = _without(self.stacks, uncalled)
            return self.run(inputs)
        return output, weights


def _at_least_one(what: str, value: int) -> None:
    if value < 1:
        raise InputError(f"{what} {value}: must be at least 1")


def _without(found: Mapping[str, Stack], layers: set[str]) -> dict[str, Stack]:
    return {layer: stack for layer, stack in found.items() if layer not in layers}


def _leading(stack: Stack, rank: int) -> list[Tensor]:
    """The first right singular vectors of every task."""
    return [part[:, :rank] for part in torch.split(stack.right, list(stack.ranks), dim=1)]


def _block(layer: str) -> str:
    """The part of a name up to its last number: the layers of one block share a gate."""
    found = re.match(r"(.*\.|^)\d+(?=\.|$)", layer)
    return found.group(0) if found else layer


def _gate(first: nn.Linear, tasks: int, scale: float) -> nn.Module:
    width = first.in_features
    last = nn.Linear(width, tasks)
    nn.init.normal_(last.weight, std=0.01)
    nn.init.constant_(last.bias, scale)
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), last).to(first.weight)
