"""Move a fine-tune to another base as a checkpoint: tensor by tensor as it is read, where that is possible."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf, isnan

from torch import Tensor

from merganser.align.objective import inner
from merganser.align.permutations import Permutations, apply, identity
from merganser.align.state import State, states_of
from merganser.align.symmetries import Factor, Symmetry, product
from merganser.align.transports import check_scales, match_bases, transport
from merganser.checkpoints.base import Checkpoint, Rows, select_rows
from merganser.checkpoints.cards import Lineage
from merganser.checkpoints.memory import StateDict
from merganser.checkpoints.recent import Recent
from merganser.checkpoints.vectors import Difference, Vector
from merganser.engine.task_vector import Applied
from merganser.modules.functional import Weights, WeightsScore


@dataclass(frozen=True)
class Transport:
    """A fine-tune that was moved to another base.

    Attributes:
        checkpoint: Its weights.
        scale: The factor on the task vector.
        scores: The score at every scale that was tried.
        cosine: The cosine of the two bases, before and after they were matched; None if they were not.
        note: What to doubt about the matching.

    Example:
        >>> moved = mg.align.transport_checkpoint(mg.open("math"), mg.open("base"), mg.open("code"), None, scale=0.5)
        >>> moved.scale, moved.cosine
        (0.5, None)
    """

    checkpoint: Checkpoint
    scale: float
    scores: dict[float, float] = field(default_factory=dict)
    cosine: tuple[float, float] | None = None
    note: str | None = None


def transport_checkpoint(
    finetuned: Checkpoint,
    source: Checkpoint,
    target: Checkpoint,
    symmetry: Symmetry | None,
    *,
    matching: str = "weights",
    start: str | None = None,
    scale: float | Sequence[float] = 1.0,
    score: WeightsScore | None = None,
) -> Transport:
    """Move a fine-tune to another base, as `transport` does, and return it as a checkpoint.

    The bases are held in memory while they are matched. The result is computed tensor by tensor as it is read, unless
    units are rotated or a score is used.

    Args:
        finetuned: The fine-tuned checkpoint.
        source: The base it was fine-tuned from.
        target: The base to move it to.
        symmetry: The symmetry of the architecture; None to leave units where they are.
        matching: How to match the bases by their weights: "weights" or "frank_wolfe".
        start: The start of the matching by "weights"; by default "propagate" and, if there are attention heads, their
            "spectra", whichever matches better.
        scale: The factor on the task vector, or several to choose from by `score`.
        score: A function of weights, higher is better. Do not score on the data you test on.

    Returns:
        The moved fine-tune.

    Raises:
        InputError: If the checkpoints do not fit the symmetry, or there are several scales and no score.

    Example:
        >>> symmetry = mg.align.symmetry(base, images)
        >>> moved = mg.align.transport_checkpoint(mg.open("math"), mg.open("base"), mg.open("code"), symmetry)
        >>> written = mg.save(moved.checkpoint, "math-on-code")
    """
    scales = check_scales(scale, score)
    cosine, note = None, None
    permutations: Permutations = {}
    if symmetry is None:
        axes = {name: tuple(product(Factor(None, n)) for n in target.spec(name).shape) for name in target}
        symmetry = Symmetry({}, axes, aliases=dict(target.aliases()))
        permutations = identity(symmetry)
    else:
        new, old = states_of([target, source], symmetry)
        options = {"start": start} if matching == "weights" and start else {}
        found = match_bases(new, old, symmetry, matching, **options)
        permutations, note = found.permutations, found.note
        cosine = _cosine(new, old, symmetry), _cosine(new, found.apply(old), symmetry)
        del new, old
    if score is None and all(atom.group == "permutation" for atom in symmetry.atoms.values()):
        vector = MovedVector(Difference(finetuned, source), symmetry, permutations)
        return Transport(Transported(target, vector, scales[0]), scales[0], {}, cosine, note)
    scores: list[float] = []

    def record(weights: Weights) -> float:
        assert score is not None
        scores.append(float(score(weights)))
        return scores[-1]

    judge = None if score is None else record
    made = transport(finetuned, source, target, symmetry, alignment=permutations, scale=scales, score=judge)
    ranked = [-inf if isnan(each) else each for each in scores]
    best = scales[ranked.index(max(ranked))] if ranked else scales[0]
    kept = {name: made[name] for name in target.names()}
    kept |= {alias: kept[name] for alias, name in target.aliases().items()}
    view = StateDict(kept, f"{finetuned.label} on {target.label}")
    view.directory = target.directory
    return Transport(view, best, dict(zip(scales, scores, strict=True)) if scores else {}, cosine, note)


class MovedVector(Vector):
    """π(τ) of a task vector, tensor by tensor; the last few are kept, since a gather needs a tensor whole."""

    def __init__(self, vector: Vector, symmetry: Symmetry, permutations: Permutations) -> None:
        known = {name: vector.spec(name) for name in vector.names()}
        super().__init__(known, f"{vector.label}, matched", (vector,))
        self.symmetry, self.permutations = symmetry, permutations
        self._whole: Recent[Tensor] = Recent(2)

    def compute(self, name: str, rows: Rows | None) -> Tensor:
        return select_rows(self._whole.get(name, lambda: self._move(name)), rows).clone()

    def _move(self, name: str) -> Tensor:
        moved = apply(self.symmetry, self.permutations, {name: self.parts[0].read(name)})
        return moved[name]

    def fingerprint(self) -> str:
        digest = hashlib.sha256(super().fingerprint().encode())
        for name in sorted(self.permutations):
            digest.update(name.encode() + self.permutations[name].tobytes())
        return digest.hexdigest()


class Transported(Applied):
    """θ_target + scale · π(τ) as a checkpoint, computed as it is read."""

    vector: MovedVector

    def _compute(self, stored: str, rows: Rows | None) -> Tensor:
        found = super()._compute(stored, rows)
        if not stored.endswith("running_var"):
            return found
        return found.where(found >= 0, self.source.read(stored, rows).to(found))

    def overhead(self, name: str, entries: int) -> int:
        """The whole tensor as it was, as it is folded, and moved."""
        return super().overhead(name, entries) + (4 * 4 * self.spec(name).numel if name in self.vector else 0)

    def lineage(self) -> Lineage:
        return Lineage(self.source.label, (self.vector.parts[0].label,), ("transport",))


def _cosine(a: State, b: State, symmetry: Symmetry) -> float:
    """Return the cosine of two states over the tensors that move."""

    def total(x: State, y: State) -> float:
        return float(sum(inner(x[name].float(), y[name].float()) for name in symmetry.objective))

    norm = (total(a, a) * total(b, b)) ** 0.5
    return total(a, b) / norm if norm else 0.0
