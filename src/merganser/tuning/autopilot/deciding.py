"""The steps: race the models, race the merges, check on unseen questions, decide."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from merganser.errors import MerganserError
from merganser.evaluate.search import Rung
from merganser.evolve.arrays import Array
from merganser.tuning.autopilot.answers import FINALISTS, BudgetSpentError, Scoreboard
from merganser.tuning.autopilot.checking import CheckResult, check
from merganser.tuning.autopilot.contenders import PLAIN, Contender
from merganser.tuning.autopilot.decisions import Challenge, Decision, MergeVerdict
from merganser.tuning.autopilot.looking import CULPRITS, Remark
from merganser.tuning.autopilot.racing import FAILED, Heat, fit_to_budget, reject, rung_ends, score, worst_case
from merganser.tuning.autopilot.zooming import planned_cost, race_merges
from merganser.tuning.expected_losses import expect_loss

#: Single models and merges that are checked. A merge must be better than both models, each at a one-sided level of
#: 2.5 %. The best of the merges is chosen by the same questions: were they unrelated, a merge would be preferred to a
#: model that is as good in about 5 % of cases, and scales side by side answer nearly alike.
MODELS = 2
#: Models that leave the race only if they are surely worse: a merge must not be compared with the wrong one.
SURE = 3
#: The largest share of the budget that is kept for the check.
KEPT = 1 / 3


@dataclass(frozen=True)
class RaceSize:
    """The size of a race and its check.

    Attributes:
        most: The questions of each task on the last rung.
        unseen: The questions of each task in the check.
        reserved: The questions that the check may ask all contenders together.
        total: About how many the race and the check ask together.
    """

    most: int
    unseen: int
    reserved: int
    total: int


def plan_size(board: Scoreboard, models: int, merges: Sequence[Contender], questions: int) -> RaceSize:
    """Return the largest check that a third of the budget allows, and the largest race beside it: with all its rungs
    and one step to closer scales.

    Raises:
        InputError: If the budget allows none.
    """
    tasks = len(board.exam.orders)
    limit, kept_back = min(questions, board.most(False)), min(2 * questions, board.most(True))

    def checking(unseen: int) -> int:
        return (MODELS + FINALISTS + 1) * board.cost(0, unseen, unseen=True)  # and task arithmetic

    def racing(most: int) -> int:
        alone = worst_case(models, rung_ends(models, most, tasks), board.cost, SURE)
        return alone + planned_cost(merges, rung_ends(len(merges), most, tasks), board.cost)

    budget, what = board.meter.budget.questions, f"{len(merges)} merges and {models} models"
    fit_to_budget(lambda count: checking(count) + racing(count), 1, budget, what)
    share = None if budget is None else max(checking(1), min(int(KEPT * budget), budget - racing(1)))
    unseen = fit_to_budget(checking, kept_back, share, what)
    left = None if budget is None else budget - checking(unseen)
    most = fit_to_budget(racing, limit, left, what)
    total = checking(unseen) + racing(most)
    return RaceSize(most, unseen, checking(unseen), total if budget is None else min(budget, total))


def race(board: Scoreboard, contenders: Sequence[Contender], most: int, reserved: int) -> Heat:
    """Ask contenders more and more of the same questions, and reject the worse ones after every rung, but the
    last `SURE` only if they are surely worse.
    """
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
        stay, why = reject(board.objective, answers, SURE)
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
    reserved = planned.reserved
    if board.meter.budget.seconds is not None:
        board.ask(models[0], 1)  # tells how long a question takes
        reserved = min(reserved, int(KEPT * max(0.0, board.meter.questions_left())))
    alone = race(board, models, planned.most, reserved)
    finalists, heat = race_merges(board, merges, planned.most, reserved)
    if heat.rungs and max(heat.rungs[-1].scores.values()) == -math.inf:
        raise MerganserError(f"no merge could be asked: {board.journal.failures.get(finalists[0].label, FAILED)}")
    seen = heat.rungs[-1].budget if heat.rungs else 0
    plain = find_plain(heat)
    found = check(board, alone.order[:MODELS], finalists[:FINALISTS], plain, heat.order, seen, planned.unseen)
    kept, best = found.kept, found.best
    verdict: MergeVerdict = "merge" if kept.is_merge else "do not merge"
    judged = kept if kept.is_merge else best
    loss = None
    if board.exam.pseudo and found.unseen:
        loss = expect_loss({task: own.tolist() for task, own in board.answers(judged, unseen=True).items()})
    text = explain(found, remarks)
    if loss is not None:
        text += f". By the experts' answers, {judged.label} is expected to lose {loss} of their accuracy"
    return Decision(
        verdict=verdict,
        text=text,
        kept=kept.label,
        recipe=board.merges.document(kept) if kept.is_merge else None,
        best=best.label,
        best_recipe=board.merges.document(best),
        score=next((each.score for each in found.challenges if each.label == kept.label), None),
        loss=loss,
        remarks=remarks,
        challenges=found.challenges,
        rungs=(*alone.rungs, *heat.rungs),
        rejected={**alone.why, **heat.why},
        asked=board.meter.asked,
        seconds=board.meter.seconds,
        stopped=alone.stopped or heat.stopped,
        seed=board.merges.seed,
    )


def explain(found: CheckResult, remarks: Sequence[Remark]) -> str:
    """Return the verdict in words."""
    kept, best = found.kept, found.best
    if not found.challenges:
        return f"do not merge: keep {kept.label}; the budget ended before anything was checked on unseen questions"
    own = next(each for each in found.challenges if each.label == kept.label)
    score = f"{own.score} on {found.unseen} unseen questions"
    last = found.challenges[-1]
    if kept.is_merge and last.against == kept.label:
        return f"merge by plain task arithmetic: {kept.label} scores {score}, and {last.label} is {_gain(last)}"
    if kept.is_merge:
        return f"merge: {kept.label} scores {score}, {_gain(own)}"
    failed = next(each for each in found.challenges if each.label == best.label)
    blame = "".join(f". {remark.text}" for remark in remarks if remark.kind in CULPRITS)
    return (
        f"do not merge: keep {kept.label}, which scores {score}; the best merge, {best.label}, is "
        f"{_gain(failed)}{_enough(failed, found.unseen)}{blame}"
    )


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
