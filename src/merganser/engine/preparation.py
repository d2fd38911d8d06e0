"""Global preparation: some rules compute a state from every tensor before the first is merged."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from merganser.methods.base import Blocks, Method
from merganser.methods.norms import common_gains


@dataclass(frozen=True)
class Preparation:
    """The global state of a method, and the gains of task vectors by model label."""

    state: Any = None
    gains: Mapping[str, float] = field(default_factory=dict)


#: A rule, its parameters, and the blocks of its tensor given a preparation.
Preparing = tuple[Method, Mapping[str, Any], Callable[[Preparation], Blocks]]


def prepare_methods(tensors: Mapping[str, Sequence[Preparing]]) -> dict[str, Preparation]:
    """Return the preparation of each method: norms first, then the rule's state from task vectors scaled by them."""
    found = {}
    for name, rules in tensors.items():
        scaled = Preparation(gains=common_gains(blocks(Preparation()) for rule, _, blocks in rules if rule.equalizes))
        preparing = [(rule, (values, blocks(scaled))) for rule, values, blocks in rules if rule.needs_preparation()]
        state = preparing[0][0].prepare([tensor for _, tensor in preparing]) if preparing else None
        found[name] = Preparation(state, scaled.gains)
    return found
