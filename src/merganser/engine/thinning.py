"""Merge an output from task vectors that an earlier merge of the same sources has thinned.

What a rule drops from a task vector does not depend on its weight. A live module keeps what is left (`Kept`),
and the next merge only combines: the two functions of the rule (`Thinning`) that every other merge runs in one go.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from merganser.checkpoints.base import read_entries
from merganser.checkpoints.dtypes import Element
from merganser.checkpoints.stored_entries import StoredEntries
from merganser.engine import fused
from merganser.engine.blocks import Piece, bounds, join
from merganser.methods.base import Group, Thinning

if TYPE_CHECKING:
    from torch import Tensor

    from merganser.engine.compute import Computation


def continue_from_kept(
    computation: Computation, span: list[Piece], state: Any
) -> tuple[fused.Recorded, fused.Addresses] | None:
    """Return the recording of `Thinning.combine` and the addresses of what it reads in a span.

    Args:
        computation: The output.
        span: The part of it.
        state: The state of the rule.

    Returns:
        Both; None if the rule is to be run as a whole.
    """
    kept, method, base = computation.settings.kept, computation.method, computation.output.base
    if kept is None or base is None or not isinstance(method, Thinning) or method.thinned_by() is None:
        return None
    if type(method).merge is not Thinning.merge:  # a rule derived from one of these
        return None
    cause, whole = computation.cause_of(method.thinned_by()), join(span)
    combine = computation.record_shared(lambda group: method.combine(group, list(group.models)), "combine")
    if cause is None or combine is None:
        return None
    nbytes = 4 * len(computation.output.inputs) * whole.numel
    vectors = kept.vectors(
        (computation.output.name, whole.offset), cause, nbytes, lambda: _thin(computation, method, span, state)
    )
    if vectors is None:
        return None
    rows = bounds(span)
    stored = read_entries(computation.sources[base.model], base.name, rows)
    if stored is None:
        return None
    addresses = fused.Addresses.of(
        [*vectors, stored[whole.offset - rows[0] * math.prod(computation.shape[1:]) :]], whole.offset
    )
    return None if addresses is None else (combine, addresses)


def _thin(computation: Computation, method: Thinning, span: list[Piece], state: Any) -> list[StoredEntries] | None:
    """Return the thinned task vectors of a span; None if torch must compute them."""
    addresses, whole = computation.addresses(span), join(span)
    found: list[StoredEntries] = []
    wide = Element.of("float32")
    for model in range(len(computation.output.inputs)):

        def thin(group: Group, model: int = model) -> Tensor:
            return method.thin(group, state)[model]

        recorded = computation.record(thin, stores=True)
        if recorded is None or addresses is None:
            return None
        found.append(StoredEntries.empty(whole.numel, wide))
        if not fused.store(recorded, addresses, whole, found[-1], wide):
            return None
    return found
