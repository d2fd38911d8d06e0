"""The steps: race the models, race the merges, check on unseen questions, decide."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from merganser.errors import MerganserError
from merganser.evaluate.search import Rung
from merganser.evolve.arrays import Array
from merganser.evolve.intervals import objective_interval, paired_interval
from merganser.tuning.autopilot.answers import BudgetSpentError, Scoreboard
from merganser.tuning.autopilot.contenders import PLAIN, Contender
from merganser.tuning.autopilot.decisions import Challenge, Decision, Verdict
from merganser.tuning.autopilot.looking import CULPRITS, Remark
from merganser.tuning.autopilot.racing import FAILED, Heat, fit_to_budget, reject, rung_ends, score, worst_case
from merganser.tuning.autopilot.zooming import FINEST, planned_cost, race_merges


@dataclass(frozen=True)
class RaceSize:
    """The number of questions per task on the last rung and in the check."""

    most: int
    unseen: int
    #: Questions that all contenders together are asked, at most.
    total: int


def plan_size(board: Scoreboard, models: int, merges: Sequence[Contender], questions: int) -> RaceSize:
    """Return the largest race that the budget allows with all its rungs and one step to closer scales.

    Raises:
        InputError: If the budget allows none.
    """
    tasks = len(board.exam.orders)
    limit, kept_back = min(questions, board.most(False)), min(2 * questions, board.most(True))

    def unseen(most: int) -> int:
        return math.ceil(kept_back * most / limit)

    def cost(most: int, steps: int = 1) -> int:
        alone = worst_case(models, rung_ends(models, most, tasks), board.cost)
        merged = planned_cost(merges, rung_ends(len(merges), most, tasks), steps, board.cost)
        return alone + merged + 3 * board.cost(0, unseen(most), unseen=True)

    budget = board.meter.budget.questions
    most = fit_to_budget(cost, limit, budget, f"{len(merges)} merges and {models} models")
    total = cost(most, int(-math.log2(FINEST)))
    return RaceSize(most, unseen(most), total if budget is None else min(budget, total))


def race(board: Scoreboard, contenders: Sequence[Contender], most: int, reserved: int) -> Heat:
    """Ask contenders more and more of the same questions, and reject the worse ones after every rung."""
    heat = Heat(list(contenders))
    for end in rung_ends(len(contenders), most, len(board.exam.orders)):
        if len(heat.order) < 2:
            break
        answers: dict[str, Mapping[str, Array]] = {}
        try:
            # In the order of the proposal, so that contenders of one method share its merge.
            for contender in [each for each in contenders if each in heat.order]:
                answers[contender.label] = board.ask(contender, end, reserved=reserved)
        except BudgetSpentError:
            heat.stopped = True
            if heat.rungs or not answers:
                break
        heat.rungs.append(Rung(end, {label: score(board.objective, own) for label, own in answers.items()}))
        stay, why = reject(board.objective, answers)
        heat.why |= {label: board.journal.failures.get(label, reason) for label, reason in why.items()}
        by_label = {contender.label: contender for contender in heat.order}
        heat.order = [by_label[label] for label in stay]
        if heat.stopped:
            break
    return heat


def find_plain(heat: Heat) -> Contender | None:
    """Return the plain contender that got furthest in a race, and scored best there."""
    last = {label: (rung.budget, score) for rung in heat.rungs for label, score in rung.scores.items()}
    plain = [each for each in heat.order if each.name == PLAIN and each.label in last]
    return max(plain, key=lambda each: last[each.label], default=None)


def check(board: Scoreboard, ladder: Sequence[Contender], count: int) -> tuple[list[Challenge], int]:
    """Ask unseen questions; each contender replaces the previous one if it is better beyond the interval.

    Returns:
        The comparisons, and the number of questions of each: fewer if the budget ends, none if it has ended.
    """
    while count and sum(board.missing(each, count, unseen=True) for each in ladder) > board.meter.questions_left():
        count //= 2
    if not count:
        return [], 0
    answers = {contender.label: board.ask(contender, count, unseen=True) for contender in ladder}
    found: list[Challenge] = []
    held: str | None = None
    for label, own in answers.items():
        gain = None if held is None else paired_interval(board.objective, own, answers[held])
        better = gain is None or gain.verdict == "better"
        found.append(Challenge(label, objective_interval(board.objective, own), held, gain, better))
        held = label if better else held
    return found, board.cost(0, count, unseen=True)


def decide(
    board: Scoreboard,
    models: Sequence[Contender],
    merges: Sequence[Contender],
    remarks: tuple[Remark, ...],
    questions: int,
    on_plan: Callable[[int], None] = lambda total: None,
) -> Decision:
    """Race, check, and return the decision; `on_plan` is called with the largest number of questions."""
    planned = plan_size(board, len(models), merges, questions)
    on_plan(planned.total)
    if board.meter.budget.seconds is not None:
        board.ask(models[0], 1)  # tells how long a question takes
    reserved = 3 * board.cost(0, planned.unseen, unseen=True)
    alone = race(board, models, planned.most, reserved)
    best, heat = race_merges(board, merges, planned.most, reserved)
    if heat.rungs and max(heat.rungs[-1].scores.values()) == -math.inf:
        raise MerganserError(f"no merge could be asked: {board.journal.failures.get(best.label, FAILED)}")
    plain = find_plain(heat)
    ladder = [alone.order[0], *([plain] if plain is not None and best.name != PLAIN else []), best]
    challenges, unseen = check(board, ladder, planned.unseen)
    held = next((c for c in reversed(challenges) if c.kept), None)
    kept = next((c for c in ladder if held is not None and c.label == held.label), ladder[0])
    verdict: Verdict = "merge" if kept.is_merge else "do not merge"
    return Decision(
        verdict=verdict,
        text=explain(kept, best, challenges, remarks, unseen),
        kept=kept.label,
        recipe=board.merges.document(kept) if kept.is_merge else None,
        best=best.label,
        best_recipe=board.merges.document(best),
        score=held.score if held else None,
        remarks=remarks,
        challenges=tuple(challenges),
        rungs=(*alone.rungs, *heat.rungs),
        rejected={**alone.why, **heat.why},
        asked=board.meter.asked,
        seconds=board.meter.seconds,
        stopped=alone.stopped or heat.stopped,
        seed=board.merges.seed,
    )


def explain(
    kept: Contender, best: Contender, challenges: Sequence[Challenge], remarks: Sequence[Remark], unseen: int
) -> str:
    """Return the verdict in words."""
    if not challenges:
        return f"do not merge: keep {kept.label}; the budget ended before anything was checked on unseen questions"
    own, last = next(each for each in challenges if each.label == kept.label), challenges[-1]
    score = f"{own.score} on {unseen} unseen questions"
    if kept == best:
        return f"merge: {kept.label} scores {score}, {_gain(own)}"
    failed = f"the best merge, {best.label}, is {_gain(last)}"
    if kept.is_merge:
        return f"merge by plain task arithmetic: {kept.label} scores {score}, and nothing surely beats it: {failed}"
    blame = "".join(f". {remark.text}" for remark in remarks if remark.kind in CULPRITS)
    return f"do not merge: keep {kept.label}, which scores {score}; {failed}{_enough(last, unseen)}{blame}"


def _gain(challenge: Challenge) -> str:
    gain = challenge.gain
    assert gain is not None
    how = "better" if gain.value >= 0 else "worse"
    told = ", which may be chance" if gain.verdict == "cannot tell" else ""
    return f"{abs(gain.value):.3f} {how} ({gain.low:+.3f} to {gain.high:+.3f}) than {challenge.against}{told}"


def _enough(challenge: Challenge, unseen: int) -> str:
    """Return how many questions would settle a difference of this size, if that is possible."""
    gain = challenge.gain
    if gain is None or gain.value <= 0 or gain.verdict != "cannot tell":
        return ""
    needed = unseen * ((gain.value - gain.low) / gain.value) ** 2
    return f"; about {needed:,.0f} unseen questions would be needed to tell" if needed < 1e6 else ""
