"""The result of a pairwise matching."""

from __future__ import annotations

from dataclasses import dataclass, field

from merganser.align.ascent import Step
from merganser.align.permutations import Permutations, apply
from merganser.align.state import State, state_of
from merganser.align.symmetries import Symmetry
from merganser.checkpoints.opening import Reference

#: Objectives count as equal up to this share of the larger.
CLOSE = 1e-4


@dataclass(frozen=True)
class Try:
    """One run of a matching: its start, the seed of its order, its objective and its time."""

    start: str
    seed: int
    objective: float
    seconds: float = field(compare=False)


@dataclass(frozen=True)
class Match:
    """Permutations of b onto a, their objective Σ⟨W_a, π(W_b)⟩, and how it was reached.

    Attributes:
        symmetry: The symmetry of the architecture.
        permutations: The map of b onto a.
        objective: The objective that was reached.
        trace: The steps of the search.
        tries: All runs, of which the best was kept.
        bound: An upper bound of the objective: Σ‖W_a‖‖W_b‖ over the tensors that move together.

    Example:
        >>> first, second = models[:2]
        >>> match = mg.align.match(first, second, mg.align.symmetry(first, images))
        >>> moved = match.apply(second)
    """

    symmetry: Symmetry
    permutations: Permutations
    objective: float
    trace: tuple[Step, ...] = ()
    tries: tuple[Try, ...] = ()
    bound: float | None = None

    def apply(self, model: Reference) -> State:
        """Return the weights of b in the space of a, with the same function."""
        return apply(self.symmetry, self.permutations, self.symmetry.canonical.of(state_of(model)))

    @property
    def optimal(self) -> bool:
        """Return whether the objective is at its bound, which proves that no permutations are better."""
        return self.bound is not None and reaches(self.objective, self.bound)

    @property
    def note(self) -> str | None:
        """Return a note if the result looks like a local optimum: several tries, and no other reached its objective."""
        agreeing = [one for one in self.tries if reaches(one.objective, self.objective)]
        if self.optimal or len(self.tries) < 2 or len(agreeing) > 1:
            return None
        found = ", ".join(f"{one.objective:.6g} from {one.start}" for one in self.tries)
        return (
            f"{len(self.tries)} tries ended at different objectives ({found}): the best of them is probably a local "
            "optimum; compare with frank_wolfe, or try more often"
        )


def reaches(objective: float, goal: float) -> bool:
    """Return whether an objective is as high as another, up to rounding."""
    return objective >= goal - CLOSE * abs(goal)
