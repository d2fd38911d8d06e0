"""Check the best merges against the best single models, on questions that the race did not use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from merganser.evolve.arrays import Array
from merganser.evolve.intervals import objective_interval, paired_interval
from merganser.tuning.autopilot.answers import BudgetSpentError, Scoreboard
from merganser.tuning.autopilot.contenders import Contender
from merganser.tuning.autopilot.decisions import Challenge
from merganser.tuning.autopilot.racing import score
from merganser.tuning.autopilot.zooming import FINEST, enclosing


@dataclass(frozen=True)
class CheckResult:
    """Contenders on unseen questions, the kept one, the best merge, and the number of questions that each was asked."""

    challenges: tuple[Challenge, ...]
    kept: Contender
    best: Contender
    unseen: int


@dataclass(frozen=True)
class Finals:
    """Models and merges on unseen questions.

    Attributes:
        board: Asks the questions.
        models: The single models that a merge must beat.
        raced: All merges of the race.
        seen: The questions of each task that all merges answered in the race.
        count: The unseen questions of each task.
        merges: The merges asked so far, by label.
        answers: The answers of models and merges, by label.
    """

    board: Scoreboard
    models: Sequence[Contender]
    raced: Sequence[Contender]
    seen: int
    count: int
    merges: dict[str, Contender] = field(default_factory=dict)
    answers: dict[str, Mapping[str, Array]] = field(default_factory=dict)

    def ask(self, contender: Contender, reserved: int = 0) -> None:
        """Ask a contender the unseen questions."""
        self.answers[contender.label] = self.board.ask(contender, self.count, unseen=True, reserved=reserved)
        if contender.is_merge:
            self.merges[contender.label] = contender

    def judge(self, one: Contender, other: Contender | None = None) -> Challenge:
        """Return the score on unseen questions, and by how much it is better than that of another."""
        own, objective = self.answers[one.label], self.board.objective
        score = objective_interval(objective, own)
        by_task = {task: float(values.mean()) for task, values in own.items()}
        if other is None:
            return Challenge(one.label, score, by_task)
        gain = paired_interval(objective, own, self.answers[other.label])
        return Challenge(one.label, score, by_task, other.label, gain, gain.verdict == "better")

    def compare_with_models(self, merge: Contender) -> Challenge:
        """Return the comparison with the model that is the hardest to beat."""
        return min((self.judge(merge, each) for each in self.models), key=lambda own: own.gain.low if own.gain else 0)

    def overall(self, contender: Contender) -> float:
        """Return the score on the questions of the race and the unseen ones."""
        before, after = self.board.answers(contender), self.answers[contender.label]
        whole = {task: np.concatenate([before[task][: self.seen], after[task]]) for task in after}
        return score(self.board.objective, whole)

    def choose(self) -> Contender:
        """Return the best, on all questions, of the merges that are better than the models; without any, a model."""
        better = [each for each in self.merges.values() if self.compare_with_models(each).better]
        return max(better or self.models, key=self.overall)

    def climb(self, reserved: int) -> None:
        """Ask scales beside that of the chosen merge, as long as one of them takes its place and the budget lasts."""
        with suppress(BudgetSpentError):
            climbed: Contender | None = None
            while (top := self.choose()).is_merge and top is not climbed:
                climbed = top
                for each in [top.at(top.scale * 2**side) for side in (-FINEST, FINEST)]:
                    if each.label not in self.merges:
                        self.board.ask(each, self.seen, reserved=reserved, between=enclosing(self.raced, each))
                        self.ask(each, reserved)


def check(
    board: Scoreboard,
    models: Sequence[Contender],
    merges: Sequence[Contender],
    plain: Contender | None,
    raced: Sequence[Contender],
    seen: int,
    count: int,
) -> CheckResult:
    """Ask unseen questions, and keep a single model unless a merge is better than all of them beyond the interval.

    Of several such merges, the one with the best score on all questions is kept. From there, scales beside it take its
    place if they are better by the same rule, as far as the budget goes. But task arithmetic, if it is also better than
    the models, gives way only to a merge that is better than task arithmetic beyond the interval.

    Args:
        board: Asks the questions.
        models: The best single models.
        merges: The best merges.
        plain: The best merge by task arithmetic, if there is one.
        raced: All merges of the race.
        seen: The questions of each task that all merges answered in the race.
        count: The unseen questions of each task: fewer are asked if the budget ends, none if it has ended.
    """
    everyone = {each.label: each for each in (*models, *merges, *([] if plain is None else [plain]))}.values()
    left = board.meter.questions_left(runs=sum(each.is_merge for each in everyone))
    while count and sum(board.missing(each, count, unseen=True) for each in everyone) > left:
        count //= 2
    found = Finals(board, models, raced, seen, count)
    with suppress(BudgetSpentError):  # methods may take longer than before
        for each in (*models, *merges) if count else ():
            found.ask(each)
    if not found.merges:
        return CheckResult((), models[0], merges[0], 0)
    found.climb(0 if plain is None else board.missing(plain, count, unseen=True))
    kept, best = found.choose(), max(found.merges.values(), key=found.overall)
    challenges = [found.compare_with_models(each) for each in found.merges.values()]
    if plain is not None and kept.is_merge and kept.at(1.0) != plain.at(1.0):
        with suppress(BudgetSpentError):
            if plain.label not in found.merges:
                found.ask(plain)
                challenges.append(found.compare_with_models(plain))
            challenges.append(found.judge(kept, plain))
            if found.compare_with_models(plain).better and not challenges[-1].better:
                kept = plain
    alone = (found.judge(each) for each in found.models)
    return CheckResult((*alone, *challenges), kept, best, board.cost(0, count, unseen=True))
