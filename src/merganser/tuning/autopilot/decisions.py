"""The result of the autopilot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from merganser.evaluate.search import Rung
from merganser.evolve.intervals import Interval
from merganser.notebooks import Shown
from merganser.plain import Result
from merganser.tuning.autopilot.looking import Remark
from merganser.tuning.expected_losses import ExpectedLoss

MergeVerdict = Literal["merge", "do not merge", "no evidence"]


@dataclass(frozen=True)
class Challenge(Result):
    """A contender on questions that the race did not use, compared with another.

    Attributes:
        label: The contender.
        score: Its score, with a 95 % interval.
        by_task: Its score on each task.
        against: The label it was compared with; None for the first, the best single model.
        gain: The difference, question by question, with a 95 % interval.
        better: Whether it is better beyond the interval.
    """

    label: str
    score: Interval
    by_task: dict[str, float]
    against: str | None = None
    gain: Interval | None = None
    better: bool = False


@dataclass(frozen=True)
class Decision(Shown, Result):
    """The decision on what to do with experts, and why.

    Attributes:
        verdict: `"merge"`, `"do not merge"`, or `"no evidence"` without data.
        text: The verdict in words.
        kept: What to use: a merge, an expert or the base.
        recipe: The recipe of the merge to use; None if a single model is kept.
        best: The best merge of the race, kept or not; None if there was no race.
        best_recipe: Its recipe.
        score: The score of the kept model on unseen questions, with a 95 % interval.
        loss: What the best merge is expected to lose, if the experts' answers stood in for the right ones.
        remarks: Findings about the experts.
        challenges: Comparisons on unseen questions, in order.
        rungs: The race: scores of contenders on the first questions of each task.
        rejected: Why contenders left the race.
        asked: Questions asked of all contenders.
        seconds: Time spent on merging and asking.
        stopped: Whether the budget ended the race early.
        seed: The seed of the order of questions.

    Example:
        >>> weights, decision = mg.tuning.auto(experts, base)
        >>> decision.verdict
        'no evidence'
    """

    verdict: MergeVerdict
    text: str
    kept: str
    recipe: dict[str, Any] | None = None
    best: str | None = None
    best_recipe: dict[str, Any] | None = None
    score: Interval | None = None
    loss: ExpectedLoss | None = None
    remarks: tuple[Remark, ...] = ()
    challenges: tuple[Challenge, ...] = ()
    rungs: tuple[Rung, ...] = ()
    rejected: dict[str, str] | None = None
    asked: int = 0
    seconds: float = 0.0
    stopped: bool = False
    seed: int = 0
