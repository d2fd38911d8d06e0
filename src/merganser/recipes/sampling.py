"""Compare a small sample of every model's weights before anything is merged or downloaded.

This needs neither torch nor numpy. Of remote models it reads a few kilobytes, by range requests.
"""

from __future__ import annotations

import math
import statistics
import struct
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from merganser.engine.merge import Merge
from merganser.engine.plan import Source

#: Cosine of the matrices of an expert and the base below which it is not a fine-tune of this base. Unrelated networks
#: have about 0, fine-tunes of language models more than 0.9.
STRANGE = 0.25
#: Length of a task vector, relative to the others', from which it dominates a sum.
LONG = 5.0
_TENSORS, _ENTRIES, _CONNECTIONS = 16, 512, 16
#: Fewest entries that make a cosine meaningful.
_ENOUGH = 512
_FORMATS = {"float64": "d", "float32": "f", "float16": "e", "bfloat16": "f"}
#: A model, the model it is compared with, and whether that is the base.
_Pair = tuple[int, int, bool]


@dataclass(frozen=True)
class Samples:
    """The result of `sample_models`.

    Attributes:
        notes: Notes on unrelated models, and on task vectors that are far longer than the others.
        nbytes: The number of bytes read.
    """

    notes: tuple[str, ...]
    nbytes: int


def sample_models(merge: Merge) -> Samples:
    """Compare a sample of the models' weights with the base, or with the first model if there is no base.

    Reads runs of 512 numbers from up to 16 matrices of every model. Models that do not store plain numbers (quantised
    ones, adapters, nested merges) are left out.

    Args:
        merge: The merge, from `prepare`.

    Returns:
        The notes, and the number of bytes read.

    Raises:
        CheckpointError: If a model cannot be read.

    Example:
        >>> sample_models(mg.recipes.prepare(mg.recipes.load("recipe.yml"))).notes
        ()
    """
    places: dict[_Pair, list[tuple[Source, Source]]] = {}
    for output in merge.plan.outputs:
        reference = output.base or output.inputs[0]
        for source in output.inputs:
            if source.model != reference.model and _is_matrix(merge, source, reference):
                pair = (source.model, reference.model, output.base is not None)
                places.setdefault(pair, []).append((source, reference))
    chosen = {pair: _spread(found) for pair, found in places.items()}
    wanted = dict.fromkeys(source for found in chosen.values() for both in found for source in both)
    with ThreadPoolExecutor(_CONNECTIONS) as pool:
        runs = dict(zip(wanted, pool.map(lambda source: _read(merge, source), wanted), strict=True))
    notes, lengths = [], {}
    for (model, other, is_base), found in chosen.items():
        known = [(a, b) for first, second in found if (a := runs[first]) and (b := runs[second])]
        theirs, ours = ([x for both in known for x in both[side][0]] for side in (0, 1))
        cosine = _cosine(theirs, ours)
        labels = [merge.plan.models[i].label for i in (model, other)]
        if len(theirs) < _ENOUGH or cosine is None:
            continue
        if cosine < STRANGE:
            what = "is not a fine-tune of the base" if is_base else "is not related to"
            notes.append(
                f"{labels[0]} {what} {labels[1]}: the cosine of {len(theirs)} of their weights is "
                f"{round(cosine, 2) + 0.0:.2f} (fine-tunes of one model: above 0.9; unrelated ones: 0); "
                "merge models that share a base"
            )
        elif is_base:
            lengths[labels[0]] = math.dist(theirs, ours)
    return Samples((*notes, *_note_long(lengths)), sum(len(run[1]) for run in runs.values() if run))


def _is_matrix(merge: Merge, *sources: Source) -> bool:
    first, second = (merge.sources[source.model].spec(source.name) for source in sources)
    floating = first.element.name in _FORMATS and second.element.name in _FORMATS
    return floating and len(first.shape) > 1 and first.shape == second.shape


def _spread(found: Sequence[tuple[Source, Source]]) -> list[tuple[Source, Source]]:
    count = min(_TENSORS, len(found))
    return [found[(2 * i + 1) * len(found) // (2 * count)] for i in range(count)]


def _read(merge: Merge, source: Source) -> tuple[Sequence[float], bytes] | None:
    """Return numbers from the middle of a tensor, with their bytes; None if they are not stored as plain numbers."""
    checkpoint = merge.sources[source.model]
    spec = checkpoint.spec(source.name)
    count = min(_ENTRIES, spec.numel)
    raw = checkpoint.peek(source.name, (spec.numel - count) // 2, count)
    if raw is None:
        return None
    wide = raw
    if spec.element.name == "bfloat16":  # the upper half of a float32
        wide = b"".join(b"\0\0" + raw[i : i + 2] for i in range(0, len(raw), 2))
    return struct.unpack(f"<{count}{_FORMATS[spec.element.name]}", wide), raw


def _cosine(first: Sequence[float], second: Sequence[float]) -> float | None:
    scale = math.hypot(*first) * math.hypot(*second)
    return sum(a * b for a, b in zip(first, second, strict=True)) / scale if 0 < scale < math.inf else None


def _note_long(lengths: dict[str, float]) -> Iterable[str]:
    for label, length in lengths.items():
        others = [other for name, other in lengths.items() if name != label]
        usual = statistics.median(others) if others else 0.0
        if usual > 0 and length / usual >= LONG:
            yield (
                f"the task vector of {label} is about {length / usual:.0f} times as long as the others': it dominates "
                "the merge; give it a smaller weight, or try norms: equal"
            )
