"""Objectives: weighted sums of measures, and whether they are maximised or minimised."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from merganser.errors import InputError, did_you_mean
from merganser.evolve.schema import SettingError, StudyRecord


@dataclass(frozen=True)
class Objective(StudyRecord):
    """A weighted sum of measures.

    Args:
        name: The name of the objective in results.
        measures: Measures -> weights: scores of tasks (`"gsm8k"`), or other measures (`"gsm8k.length"`).
        maximize: Whether more is better; by default what the measures say.

    Example:
        >>> mean = mg.evolve.Objective("mean", {"math": 0.5, "code": 0.5})
    """

    name: str
    measures: Mapping[str, float]
    maximize: bool | None = None

    def __post_init__(self) -> None:
        if not self.measures:
            raise SettingError("measures: name at least one, with its weight")
        for measure, weight in self.measures.items():
            if not math.isfinite(weight):
                raise SettingError(f"the weight of {measure!r} must be a finite number, not {weight}")

    @classmethod
    def of(cls, measure: str) -> Objective:
        """Return the objective that is one measure."""
        return cls(measure, {measure: 1.0})

    @property
    def sign(self) -> int:
        """Return the factor that makes the objective one to maximise."""
        return -1 if self.maximize is False else 1

    def value(self, scores: Mapping[str, float]) -> float:
        for measure in self.measures:
            if measure not in scores:
                raise InputError(
                    f"objective {self.name!r}: the evaluator reported no {measure!r}{did_you_mean(measure, scores)}"
                )
        return sum(weight * scores[measure] for measure, weight in self.measures.items())

    def directed(self, directions: Mapping[str, str]) -> Objective:
        """Return the objective with `maximize` set; refuse one that would reward worse models.

        A measure that is better when higher and has a positive weight should be maximised, and so should one that is
        better when lower and has a negative weight. Without any direction, the objective is maximised.

        Args:
            directions: "higher" or "lower" for the measures that have a direction.

        Raises:
            SettingError: If the measures contradict each other or `maximize`.

        Example:
            >>> Objective.of("p").directed({"p": "lower"}).maximize
            False
        """
        wishes = {m: (directions[m] == "higher") == (w > 0) for m, w in self.measures.items() if w and m in directions}
        up = next((measure for measure, rise in wishes.items() if rise), None)
        down = next((measure for measure, rise in wishes.items() if not rise), None)
        if up is not None and down is not None:
            raise SettingError(
                f"objective {self.name!r}: with these weights a better {up!r} raises it and a better {down!r} lowers "
                "it; give one of them a weight of the other sign"
            )
        natural = down is None
        if self.maximize not in (None, natural) and wishes:
            raise SettingError(
                f"objective {self.name!r}: maximize: {str(self.maximize).lower()} would look for the worst "
                f"{up or down!r}, whose {directions[up or down or '']} values are better; leave it out"
            )
        return replace(self, maximize=natural if self.maximize is None else self.maximize)
