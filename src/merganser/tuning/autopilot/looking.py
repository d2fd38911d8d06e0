"""Look at the weights of experts before merging them: experts of another base, duplicates, very long task vectors.

One streamed pass over all checkpoints gives the inner products of their weights, and everything else follows from
those: ⟨τ_i, τ_j⟩ = ⟨θ_i − θ_0, θ_j − θ_0⟩.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from merganser.checkpoints.base import Checkpoint, is_integer
from merganser.engine.geometry import Entries, cosines, pair_sums
from merganser.errors import InputError
from merganser.interference.advice import OPPOSED, TWINS, UNEQUAL
from merganser.plain import Result
from merganser.recipes.sampling import LONG, STRANGE

#: Distance of two task vectors, relative to the longer, up to which they are one expert given twice.
SAME = 0.01


@dataclass(frozen=True)
class Remark(Result):
    """Something to know about the experts.

    Attributes:
        kind: What it is about.
        text: A sentence for the user.
        experts: The experts it is about, the one to blame first.
    """

    kind: Literal["other base", "equals base", "duplicate", "long", "norms", "twins", "opposed", "note"]
    text: str
    experts: tuple[str, ...] = ()


#: Kinds of remarks whose first expert does not take part in merges, and whose first expert may spoil them.
LEFT_OUT, SUSPECT = ("equals base", "duplicate"), ("other base", "long")
#: Kinds that name somebody to blame if no merge is worth it.
CULPRITS = (*SUSPECT, *LEFT_OUT, "opposed")


def look(base: Checkpoint, experts: Mapping[str, Checkpoint]) -> tuple[Remark, ...]:
    """Return remarks on the experts of a base, the most serious first.

    Args:
        base: What the experts should have been fine-tuned from.
        experts: The experts by name.

    Raises:
        InputError: If an expert shares no tensor with the base, or contains values that are not finite.
    """
    opened, names = [*experts.values(), base], list(experts)
    shared = [name for name in base.names() if _is_shared(name, base, opened)]
    if not shared:
        raise InputError(f"the experts {', '.join(names)} and the base have no tensor of one name and shape in common")
    # Unrelated networks also have scales near 1 and biases near 0, so only matrices show where a model comes from.
    matrices = [name for name in shared if len(base.spec(name).shape) > 1]
    alike = pair_sums(opened, matrices, lambda a, b: a * b)
    gram = alike + pair_sums(opened, [name for name in shared if name not in set(matrices)], lambda a, b: a * b)
    for name, square in zip([*names, base.label], np.diag(gram), strict=True):
        if not np.isfinite(square):
            raise InputError(f"{name}: contains NaN or infinite values; use a sound checkpoint")
    with_base = cosines(alike if matrices else gram)[-1, :-1]
    deltas = gram[:-1, :-1] - gram[:-1, -1:] - gram[-1:, :-1] + gram[-1, -1]
    lengths = np.sqrt(np.maximum(np.diag(deltas), 0.0))
    still = lengths <= 1e-7 * np.sqrt(gram[-1, -1])  # as small as rounding makes it
    found = [
        Remark("equals base", f"{name} equals the base: there is nothing of it to merge", (name,))
        for name, zero in zip(names, still, strict=True)
        if zero
    ]
    for name, cosine, length in zip(names, with_base, lengths / np.sqrt(gram[-1, -1]), strict=True):
        if cosine < STRANGE:
            text = (
                f"{name} is not a fine-tune of this base: the cosine of their matrices is {round(cosine, 2) + 0.0:.2f} "
                f"(unrelated networks: 0) and its task vector is {length:.2g} times as long as the base"
            )
            found.append(Remark("other base", text, (name,)))
    strange = {remark.experts[0] for remark in found}
    kept = [i for i, name in enumerate(names) if name not in strange]
    pairs = _pairs(names, kept, deltas, lengths)
    twice = {remark.experts[0] for remark in pairs if remark.kind == "duplicate"}
    return (*found, *pairs, *_norms(names, [i for i in kept if names[i] not in twice], lengths))


def _is_shared(name: str, base: Checkpoint, opened: Sequence[Checkpoint]) -> bool:
    spec = base.spec(name)
    return not is_integer(spec.dtype) and all(name in each and each.spec(name).shape == spec.shape for each in opened)


def _pairs(names: Sequence[str], kept: Sequence[int], deltas: Entries, lengths: Entries) -> list[Remark]:
    """Return the duplicates, then the twins and the opposed."""
    found: list[Remark] = []
    similar = cosines(deltas)
    for position, i in enumerate(kept):
        for j in kept[:position]:
            apart = np.sqrt(max(0.0, deltas[i, i] + deltas[j, j] - 2 * deltas[i, j]))
            cosine, a, b = float(similar[i, j]), names[i], names[j]
            if apart <= SAME * max(lengths[i], lengths[j]):
                found.insert(0, Remark("duplicate", f"{a} is {b} once more: it would count twice", (a, b)))
                break
            if cosine >= TWINS:
                text = f"{b} and {a} are near-twins (cosine {cosine:.2f}): average them first, or keep one"
                found.append(Remark("twins", text, (a, b)))
            elif cosine <= OPPOSED:
                text = f"{b} and {a} oppose each other (cosine {cosine:.2f}): any sum weakens both"
                found.append(Remark("opposed", text, (a, b)))
    return found


def _norms(names: Sequence[str], kept: Sequence[int], lengths: Entries) -> list[Remark]:
    """Return whose task vector is far longer than the others', or how unequal they are."""
    found = []
    for i in kept:
        others = [lengths[j] for j in kept if j != i]
        ratio = float(lengths[i] / np.median(others)) if others else 1.0
        if ratio >= LONG:
            text = f"{names[i]} is {ratio:.0f} times as long as the other task vectors: it dominates a sum"
            found.append(Remark("long", text, (names[i],)))
    if found or len(kept) < 2:
        return found
    longest, shortest = (names[pick(kept, key=lambda i: lengths[i])] for pick in (max, min))
    ratio = float(max(lengths[i] for i in kept) / min(lengths[i] for i in kept))
    if ratio < UNEQUAL:
        return []
    text = f"the task vector of {longest} is {ratio:.1f} times as long as that of {shortest}"
    return [Remark("norms", text, (longest, shortest))]
