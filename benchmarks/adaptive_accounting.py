"""What input-adaptive merging costs: numbers stored, and multiply-adds per request."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.utils.flop_counter import FlopCounterMode

from merganser.checkpoints.base import is_integer
from merganser.library.library import Library
from merganser.library.views import MergedExperts
from merganser.methods.matrices import matrix_shape
from merganser.modules.inputs import Inputs
from merganser.modules.moments import evaluating
from merganser.routing.composition import Composer, Composition, applied

if TYPE_CHECKING:
    from merganser.routing.adaptive import AdaptiveModel

T = TypeVar("T")


@dataclass(frozen=True)
class Stored:
    """Numbers and bytes of a base, of what its experts changed of it, and of the experts' files and the heads."""

    base: int
    trained: int
    experts: Mapping[str, int]
    heads: int
    base_bytes: int
    trained_bytes: int
    expert_bytes: int

    @property
    def relative(self) -> float:
        """All that is stored over the base, in numbers."""
        return (self.base + sum(self.experts.values()) + self.heads) / self.base

    @property
    def relative_to_trained(self) -> float:
        """The same without tensors that no expert changed: (trained tensors + experts) over trained tensors, in bytes.
        A frozen embedding does not flatter it."""
        return (self.trained_bytes + self.expert_bytes) / max(1, self.trained_bytes)


def stored(library: Library, heads: int = 0) -> Stored:
    """Count a library; the fixed merge is computed from it and stored nowhere."""
    base = library.base
    specs = {name: base.spec(name) for name in base.names() if not is_integer(base.spec(name).dtype)}
    files = {name: library.expert(name).file for name in library.experts}
    changed = {name for file in files.values() for name in file.kinds if name in specs}
    counts = {name: sum(file.weights.spec(key).numel for key in file.weights.names()) for name, file in files.items()}
    return Stored(
        sum(spec.numel for spec in specs.values()),
        sum(specs[name].numel for name in changed),
        counts,
        heads,
        sum(spec.nbytes for spec in specs.values()),
        sum(specs[name].nbytes for name in changed),
        sum(library.size().experts.values()),
    )


@dataclass(frozen=True)
class Cost:
    """Multiply-adds of answering a batch: each step, and one plain forward pass of the same batch for comparison."""

    first_pass: int
    router: int
    second_pass: int
    switch: int
    forward: int

    @property
    def ratio(self) -> float:
        """All steps over one forward pass."""
        return (self.first_pass + self.router + self.second_pass + self.switch) / max(1, self.forward)

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.first_pass + other.first_pass,
            self.router + other.router,
            self.second_pass + other.second_pass,
            self.switch + other.switch,
            self.forward + other.forward,
        )


def measure(model: AdaptiveModel, batch: Any) -> Cost:
    """Answer a batch and count. Passes are counted as torch runs them (matrix products, convolutions, attention); the
    switch to a set by its formulas, which include eigenvectors. The model's cache takes part as it always does."""
    inputs = Inputs.of(batch, model.module)
    with evaluating(model.module):
        forward = multiply_adds(lambda: inputs.run(model.module))[1]
    model.prepare()
    seen, first = multiply_adds(lambda: model.first_pass(inputs))
    samples = len(next(iter(seen.inputs.values())))
    router = multiply_adds(lambda: model.router.weights(seen.inputs))[1]
    routing = model.route(inputs)
    second = switch = 0
    for tasks, index in routing.groups().items():
        composition, spent = switch_to(model, tasks, seen.rows * len(index) // samples)
        switch += spent
        part = inputs.select(index)
        with applied(model.module, composition):
            second += multiply_adds(lambda part=part: part.run(model.module))[1]  # type: ignore[misc]
    return Cost(first, router, second, switch, forward)


def switch_to(model: AdaptiveModel, tasks: frozenset[str], rows: int) -> tuple[Composition, int]:
    """The composition that a model applies for a set, and the multiply-adds of computing it now: none of one that its
    cache has, and the products of whole matrices where it builds them."""
    kept = model.cache.kept.get(tasks)
    composition = model.composition(tasks, rows)
    low_rank = kept or model.composer.compose(tasks)
    spent = 0 if kept is not None else cost_of_merging(model.composer, low_rank)
    return composition, spent + (0 if composition.low_rank else low_rank.to_build)


def cost_of_merging(composer: Composer, made: Composition) -> int:
    """Multiply-adds of composing a set: of the cores of its low-rank updates, and of merging its whole matrices. A
    single expert is not merged; a core that is refused because experts are nearly parallel is not counted."""
    names = [name for name in composer.library.experts if name in made.tasks]
    merged = composer.library.merge(names, **composer.parameters)
    if (merged.rule.scale, merged.rule.weight) == (1.0, (1.0,)):
        return 0
    cores = (
        core_cost(*matrix_shape(tuple(composer.tensors[name].shape)), len(update.core))
        for name, update in made.low_rank.items()
        if update.core.dim() == 2
    )
    return sum(cores) + sum(_cost_of_whole(composer.stored[name], merged) for name in made.whole)


def core_cost(d: int, m: int, rank: int) -> int:
    """Multiply-adds of a core: half of two Gram matrices, 9r³ operations or 4.5r³ multiply-adds per eigenproblem (Golub
    and Van Loan, symmetric QR with vectors), and three products."""
    return (d + m) * rank * (rank + 1) // 2 + 12 * rank**3


def _cost_of_whole(name: str, merged: MergedExperts) -> int:
    """Multiply-adds of merging a whole matrix: two polar factors (half a Gram matrix, 5r³ for its root, the product)
    and their product. Decomposing matrices that the library stores whole is not counted."""
    experts = merged.changing(name)
    if not experts or not merged.is_factored(name):
        return 0
    d, m = matrix_shape(merged.spec(name).shape)
    columns = sum(
        min(merged.rank_of(name), e.file.rank(name) if e.file.kinds[name] == "factors" else min(d, m)) for e in experts
    )
    cost = d * m * columns
    for side in (d, m) if merged.rule.orthogonalize != "none" and len(experts) > 1 else ():
        r = min(side, columns)
        cost += max(side, columns) * r * r * 3 // 2 + 5 * r**3
    return cost


@torch.no_grad()
def multiply_adds(run: Callable[[], T]) -> tuple[T, int]:
    """A result, and the multiply-adds it took."""
    with FlopCounterMode(display=False) as counter:
        result = run()
    return result, counter.get_total_flops() // 2
