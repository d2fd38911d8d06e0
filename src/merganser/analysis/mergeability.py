"""Estimate how hard a set of experts is to merge, from their weights alone.

Signals of every pair of experts, all cheap and without data:

- `overlap`: the normalised interference of their leading singular vectors (`interference.sti.Overlap.normalized`),
  mean over a sample of matrices, minus that of unrelated experts; 0 for orthogonal, 1 for equal subspaces;
- `cosine` of the whole task vectors, and `sign_agreement` of their entries in the sample;
- `distance`: the larger ‖τ‖/‖θ_0‖: the further experts move, the less linear they are;
- `imbalance`: 1 − the smaller norm over the larger: a sum loses its smaller term;
- `bend`: 1 − the smaller cos(τ_1, τ_K) over the epochs of their runs, if these are given.

Shared directions are harmless to experts that agree on them, so the two are one quantity, conflict = overlap · (1 −
cosine)/2. The difficulty of a pair is 1 − (1 − conflict) Π (1 − w s) over the other signals with weights `WEIGHTS`:
monotone in every signal, in [0, 1], and a heuristic, not a calibration.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from merganser.analysis.inner_products import STATISTICS
from merganser.analysis.trajectory import linear_regime
from merganser.checkpoints.opening import Reference
from merganser.checkpoints.opening import open as open_checkpoint
from merganser.engine.geometry import inner_products, sign_agreement
from merganser.engine.task_vector import TaskVector
from merganser.errors import InputError, require_mapping
from merganser.interference.sti import Overlap
from merganser.kernels.spectra import top_svd
from merganser.plain import Result

WEIGHTS = {"distance": 0.5, "imbalance": 0.25, "bend": 0.5}
#: A distance of this share of the base counts as 1 − 1/e.
FAR = 0.1
#: Difficulty from which a set is moderate, and from which it is hard.
MODERATE, HARD = 0.15, 0.4


@dataclass(frozen=True)
class Pair(Result):
    """The signals of two experts, and their combined difficulty."""

    experts: tuple[str, str]
    difficulty: float
    conflict: float
    overlap: float
    cosine: float
    sign_agreement: float
    distance: float
    imbalance: float
    bend: float | None


@dataclass(frozen=True)
class Mergeability(Result):
    """`difficulty` is the mean over pairs; `blame` names the worst pair, `by_expert` the mean over each expert's
    pairs.
    """

    difficulty: float
    verdict: Literal["easy", "moderate", "hard"]
    blame: tuple[str, str]
    reason: str
    by_expert: dict[str, float]
    pairs: tuple[Pair, ...]
    sampled: tuple[str, ...]


def mergeability(
    base: Reference,
    experts: Mapping[str, Reference],
    *,
    runs: Mapping[str, Sequence[Reference]] | None = None,
    matrices: int = 16,
    rank: int = 16,
    exclude: Sequence[str] = STATISTICS,
) -> Mergeability:
    """Estimate the difficulty of merging `experts` of `base`, and name the worst pair.

    Some matrices are decomposed; everything else is one streamed pass.

    Args:
        base: The base of the experts.
        experts: The experts by name.
        runs: Checkpoints [base, epoch 1, …] of their fine-tuning runs, if available.
        matrices: The most matrices to decompose, spread over the depth.
        rank: The number of components of each.
        exclude: Globs of tensors to leave out.
    """
    require_mapping("experts", experts)
    if len(experts) < 2:
        raise InputError(f"mergeability compares pairs; expected two or more experts, got {len(experts)}")
    if rank < 1:
        raise InputError(f"expected a rank of at least 1, got {rank}")
    if runs is not None and set(runs) != set(experts):
        raise InputError(f"runs are of {sorted(runs)}, but experts of {sorted(experts)}; name the same tasks")
    names = list(experts)
    origin = open_checkpoint(base)
    vectors = [TaskVector(experts[name], origin, exclude=exclude) for name in names]
    weights = TaskVector.load(origin, exclude=exclude)
    gram = inner_products([*vectors, weights])
    squares = [float(gram[i, i]) for i in range(len(gram))]
    if wrong := [name for name, square in zip([*names, "the base"], squares, strict=True) if not math.isfinite(square)]:
        raise InputError(f"{wrong[-1]}: contains NaN, infinite or enormous values")
    norms = [math.sqrt(square) for square in squares]
    if still := [name for name, norm in zip(names, norms, strict=False) if norm == 0]:
        raise InputError(f"{still[0]!r} equals the base: there is nothing to merge")
    sampled = sample(vectors[0], matrices)
    overlaps = _overlaps(vectors, sampled, rank)
    bends = {n: 1 - c for n, c in linear_regime(runs, exclude=exclude).final_cosines.items()} if runs else None
    pairs = tuple(
        judge_pair(
            (names[i], names[j]),
            (norms[i], norms[j], norms[-1]),
            overlap=overlaps[i, j],
            cosine=float(gram[i, j]) / (norms[i] * norms[j]),
            signs=_signs(vectors[i], vectors[j], sampled),
            bend=max(bends[names[i]], bends[names[j]]) if bends else None,
        )
        for i, j in itertools.combinations(range(len(names)), 2)
    )
    worst = max(pairs, key=lambda pair: pair.difficulty)
    mean = math.fsum(pair.difficulty for pair in pairs) / len(pairs)
    return Mergeability(
        difficulty=mean,
        verdict="hard" if mean >= HARD else "moderate" if mean >= MODERATE else "easy",
        blame=worst.experts,
        reason=_reason(worst),
        by_expert={
            name: math.fsum(p.difficulty for p in pairs if name in p.experts) / (len(names) - 1) for name in names
        },
        pairs=pairs,
        sampled=tuple(sampled),
    )


def sample(vector: TaskVector, count: int) -> list[str]:
    """Return matrices spread evenly over the order of the checkpoint, which follows the depth.

    Args:
        vector: The task vector.
        count: The most matrices to return.
    """
    found = [n for n in vector.names() if len(s := vector.spec(n).shape) == 2 and min(s) > 1]
    if count < 1:
        raise InputError(f"expected at least one matrix, got {count}")
    if len(found) <= count:
        return found
    return [found[round(i * (len(found) - 1) / max(1, count - 1))] for i in range(count)]


def rank_correlation(difficulty: Sequence[float], loss: Sequence[float]) -> float:
    """Return Spearman's ρ between estimated difficulties and the measured cost of merging, over several sets or
    pairs.

    Args:
        difficulty: The estimates.
        loss: What merging cost, in the same order.
    """
    if len(difficulty) != len(loss) or len(loss) < 3:
        raise InputError(f"{len(difficulty)} estimates for {len(loss)} losses; expected equal numbers, three or more")
    from scipy.stats import spearmanr

    return float(spearmanr(difficulty, loss).statistic)


def _overlaps(vectors: Sequence[TaskVector], names: Sequence[str], rank: int) -> dict[tuple[int, int], float]:
    """Return the normalised interference of every pair above chance, mean over the matrices."""
    found: dict[tuple[int, int], list[float]] = {pair: [] for pair in itertools.combinations(range(len(vectors)), 2)}
    for name in names:
        factors = [top_svd(vector.read(name), rank) for vector in vectors]
        for i, j in found:
            if factors[i].rank and factors[j].rank:
                overlap = Overlap.of([factors[i], factors[j]])
                chance = min(overlap.chance(), 0.99)
                found[i, j].append(max(0.0, overlap.normalized() - chance) / (1 - chance))
    return {pair: math.fsum(values) / len(values) if values else 0.0 for pair, values in found.items()}


def _signs(a: TaskVector, b: TaskVector, names: Sequence[str]) -> float:
    share = sign_agreement(a.only(*names), b.only(*names)) if names else math.nan
    return 0.5 if math.isnan(share) else share


def judge_pair(
    experts: tuple[str, str],
    lengths: tuple[float, float, float],
    *,
    overlap: float,
    cosine: float,
    signs: float,
    bend: float | None,
) -> Pair:
    """Return the signals of two experts and the difficulty that follows from them.

    Args:
        experts: Their names.
        lengths: The lengths of their task vectors, and of the base.
        overlap: The normalised interference of their leading singular vectors, above chance.
        cosine: The cosine of their task vectors.
        signs: The share of entries with equal signs.
        bend: 1 − the smaller cosine of first and last epoch; None without runs.
    """
    *norms, base = lengths
    overlap = min(1.0, overlap)
    conflict = overlap * (1 - cosine) / 2
    distance = 1 - math.exp(-max(norms) / (FAR * base)) if base else 1.0
    imbalance = 1 - min(norms) / max(norms)
    signals = {"distance": distance, "imbalance": imbalance, "bend": min(1.0, max(0.0, bend or 0.0))}
    ease = (1 - conflict) * math.prod(1 - WEIGHTS[name] * value for name, value in signals.items())
    return Pair(experts, 1 - ease, conflict, overlap, cosine, signs, distance, imbalance, bend)


def _reason(pair: Pair) -> str:
    """Return the signal that contributes most to a pair's difficulty, in words."""
    a, b = pair.experts
    shared = f"overlap {pair.overlap:.2f}, cosine {pair.cosine:.2f}"
    costs = {
        f"{a} and {b} use the same directions to different ends ({shared})": pair.conflict,
        f"{a} or {b} is far from the base": WEIGHTS["distance"] * pair.distance,
        f"{a} and {b} differ in size: the smaller one is lost": WEIGHTS["imbalance"] * pair.imbalance,
        f"the fine-tuning of {a} or {b} has left the linear regime": WEIGHTS["bend"] * (pair.bend or 0.0),
    }
    return max(costs, key=lambda text: costs[text])
