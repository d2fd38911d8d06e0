"""What a pairwise matching returns."""

from __future__ import annotations

from dataclasses import dataclass

from merganser.align.ascent import Step
from merganser.align.permutations import Permutations, apply
from merganser.align.state import Model, State, state_of
from merganser.align.symmetries import Symmetry


@dataclass(frozen=True)
class Match:
    """Permutations of b onto a, their objective Σ⟨W_a, π(W_b)⟩, and how it was reached."""

    symmetry: Symmetry
    permutations: Permutations
    objective: float
    trace: tuple[Step, ...] = ()

    def apply(self, model: Model) -> State:
        """The weights of b in the space of a: the same function."""
        return apply(self.symmetry, self.permutations, state_of(model))
