"""Race merges over methods and scales at once: on every rung fewer methods, more questions and closer scales.

The score of a method depends on its scale, often with a narrow peak, so methods are compared at the best scales known
of each. On every rung the best scales of a method answer twice as many questions, the worse half of the methods leaves,
and the others try the scales on both sides of their best, half as far away as before. The last three methods go on: a
method is given up only for being worse at a scale of its own. After the last rung, the best method that can still be
refined is, until the best scales of all are an eighth of an octave from their neighbours.

A scale between two others that are at most half an octave apart answers nearly every question on which these agree as
they do: of 450 questions to merged language models, at most 0.7 % were answered otherwise (4.7 % an octave apart). It
takes those answers over, and only the other questions are asked: often a fifth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise

from merganser.evaluate.search import Rung, rung_sizes
from merganser.evolve.arrays import Array
from merganser.tuning.autopilot.answers import FINALISTS, BudgetSpentError, Scoreboard
from merganser.tuning.autopilot.contenders import Contender
from merganser.tuning.autopilot.racing import Heat, reject, rung_ends, score

#: Scales of each method that go on to the next rung.
CARRIED = 3
#: The smallest distance between scales, in octaves.
FINEST = 1 / 8
#: The largest distance, in octaves, of two scales whose common answers a scale in between takes over.
REACH = 1 / 2
#: Why a merge leaves the race although its method stays.
OUTSCALED = "other scales are better"


def later_rungs(methods: int, ends: Sequence[int], cost: Callable[[int, int], int]) -> int:
    """Return the maximum number of questions from `ends[0]` to `ends[-1]`, apart from new scales."""
    sizes = rung_sizes(methods, len(ends) - 1)
    return sum(
        CARRIED * max(min(methods, FINALISTS), size) * cost(*span)
        for size, span in zip(sizes, pairwise(ends), strict=False)
    )


def planned_cost(merges: Sequence[Contender], ends: Sequence[int], cost: Callable[[int, int], int]) -> int:
    """Return the questions of a race in which the last methods try two closer scales each; others take few."""
    methods = len(group(merges))
    halved = max(min(methods, FINALISTS), math.ceil(methods / 2))
    closer = 2 * min(methods, FINALISTS) * cost(0, ends[-1])
    return len(merges) * cost(0, ends[0]) + later_rungs(halved, ends, cost) + closer


def group(merges: Sequence[Contender]) -> dict[str, list[Contender]]:
    """Return the merges that differ only in their scale, by what they have in common."""
    found: dict[str, list[Contender]] = {}
    for each in merges:
        found.setdefault(each.at(1.0).label, []).append(each)
    return found


def enclosing(known: Iterable[Contender], contender: Contender) -> tuple[Contender, ...]:
    """Return the closest known scales on both sides of a contender's, unless they are too far apart."""
    key = contender.at(1.0).label
    own = sorted((each for each in known if each.is_merge and each.at(1.0).label == key), key=lambda each: each.scale)
    below = [each for each in own if each.scale < contender.scale][-1:]
    above = [each for each in own if each.scale > contender.scale][:1]
    near = below and above and math.log2(above[0].scale / below[0].scale) < 1.01 * REACH
    return (*below, *above) if near else ()


class MergeRace:
    """A race of merges.

    Args:
        board: Asks the questions.
        merges: The initial merges, an octave apart.
    """

    def __init__(self, board: Scoreboard, merges: Sequence[Contender]) -> None:
        self.board = board
        self.methods = group(merges)
        #: The distance of the closest scales of each method, in octaves.
        self.octaves = dict.fromkeys(self.methods, 1.0)
        #: Questions per task that all remaining methods have answered, and the answers by that number and label.
        self.count = 0
        self.answers: dict[int, dict[str, Mapping[str, Array]]] = {}
        self.asked: dict[str, Contender] = {}
        self.why: dict[str, str] = {}

    def height(self, contender: Contender) -> float:
        own = self.answers.get(self.count, {}).get(contender.label)
        return -math.inf if own is None else score(self.board.objective, own)

    def best(self, method: str) -> Contender:
        return max(self.methods[method], key=self.height)

    def ask(self, contenders: Sequence[Contender], count: int, reserved: int) -> None:
        own = self.answers.setdefault(count, {})
        for each in contenders:
            own[each.label] = self.board.ask(
                each, count, reserved=reserved, between=enclosing(self.asked.values(), each)
            )
            self.asked[each.label] = each

    def climb(self, count: int, reserved: int) -> None:
        """Ask the best scales of every method more questions, those between others last."""
        if self.count:
            for method, own in self.methods.items():
                order = sorted(own, key=self.height, reverse=True)
                self.methods[method] = [each for each in own if each in order[:CARRIED]]
                self.leave(order[CARRIED:], OUTSCALED)
        for own in self.methods.values():
            order = sorted(own, key=lambda each: each.scale)
            self.ask([order[0], *order[:0:-1]], count, reserved)
        self.count = count

    def leave(self, contenders: Sequence[Contender], reason: str) -> None:
        failures = self.board.journal.failures
        self.why |= {each.label: failures.get(each.label, reason) for each in contenders}

    def drop_scales(self) -> None:
        """Drop the merges that are surely worse than the leader."""
        stay, why = reject(self.board.objective, self.answers[self.count], len(self.answers[self.count]))
        for method, own in list(self.methods.items()):
            for each in own:
                if each.label in why:
                    self.leave([each], why[each.label])
            self.methods[method] = [each for each in own if each.label in stay]
        self.methods = {method: own for method, own in self.methods.items() if own}

    def drop_methods(self, fewest: int) -> None:
        """Drop the methods whose best scale is surely worse than the leader, and the worse half down to `fewest`."""
        tops = {self.best(method).label: method for method in self.methods}
        stay, why = reject(self.board.objective, {top: self.answers[self.count][top] for top in tops}, fewest)
        for top, reason in why.items():
            self.leave(self.methods[tops[top]], reason)
        self.methods = {tops[top]: self.methods[tops[top]] for top in stay}

    def unrefined(self) -> list[str]:
        """Return the methods whose scales can come closer, in order."""
        return [method for method in self.methods if self.octaves[method] > FINEST]

    def zoom(self, methods: Sequence[str], reserved: int) -> None:
        """Ask methods at both sides of their best scale, half as far away as before, as far as the budget goes."""
        for method in methods:
            self.octaves[method] /= 2
            best = self.best(method)
            with suppress(BudgetSpentError):
                for side in (-self.octaves[method], self.octaves[method]):
                    new = best.at(best.scale * 2**side)
                    if new.label not in self.answers[self.count]:
                        self.ask([new], self.count, reserved)
                        self.methods[method].append(new)

    def finalists(self) -> list[Contender]:
        """Return the best scale of each of the last methods, the best first; without scores, any."""
        found = sorted(map(self.best, self.methods), key=self.height, reverse=True)
        return [each for each in found if self.height(each) > -math.inf] or found[:1]


def race_merges(
    board: Scoreboard, merges: Sequence[Contender], most: int, reserved: int
) -> tuple[list[Contender], Heat]:
    """Return the best merge of each of the last methods, the best first, and the race.

    Args:
        board: Asks the questions.
        merges: The initial merges, an octave apart.
        most: The number of questions per task on the last rung.
        reserved: The questions of the budget that are left for the check.
    """
    race, stopped = MergeRace(board, merges), False
    ends = rung_ends(len(merges), most, len(board.exam.orders))
    try:
        if ends[0] > 1:  # many scales are hopeless, and few questions show it
            race.climb(ends[0] // 2, reserved)
            race.drop_scales()
        for place, end in enumerate(ends):
            race.climb(end, reserved)
            race.drop_methods(FINALISTS)
            race.zoom(race.unrefined(), reserved + later_rungs(len(race.methods), ends[place:], board.cost))
        while methods := race.unrefined():  # the best first
            race.zoom(methods[:1], reserved)
            race.drop_methods(len(race.methods))
    except BudgetSpentError:
        stopped = True
    race.count = race.count or max((count for count, own in race.answers.items() if own), default=0)
    rungs = [
        Rung(count, {label: score(board.objective, each) for label, each in own.items()})
        for count, own in race.answers.items()
        if own and count <= race.count
    ]
    finalists = race.finalists()
    race.leave([each for own in race.methods.values() for each in own if each not in finalists], OUTSCALED)
    return finalists, Heat([*race.asked.values()], rungs, race.why, stopped)
