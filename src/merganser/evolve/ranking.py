"""Rank trials: the best by one objective, the Pareto front by several. Failed, infeasible and stopped trials cannot
win.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from merganser.errors import InputError, MerganserError, did_you_mean
from merganser.evolve.objectives import Objective
from merganser.evolve.store import Trial

#: The error of a trial whose values already failed.
COPIED = "the same values failed in this generation"


def nothing(trials: Iterable[Trial]) -> str:
    """Explain why a search has no valid trial: there is none yet, or the most common error of the failed ones."""
    tried = list(trials)
    if not tried:
        return "no candidate has been evaluated yet: wait for the run, or resume it if it was interrupted"
    reasons = Counter(trial.reason for trial in tried if trial.state == "failed")
    why = f"; the most common error: {reasons.most_common(1)[0][0]}" if reasons else ""
    return f"no candidate was evaluated successfully inside the constraints{why}"


def find_common_failure(trials: Sequence[Trial]) -> str | None:
    """Return the only reason why every evaluated trial failed; None if one succeeded, or there is just one."""
    tried = [trial for trial in trials if trial.state != "infeasible"]
    reasons = {trial.reason for trial in tried if trial.cached_from is None and trial.error != COPIED}
    if len(tried) < 2 or len(reasons) != 1 or any(trial.state != "failed" for trial in tried):
        return None
    return reasons.pop()


def best(trials: Iterable[Trial], objectives: Sequence[Objective], name: str | None = None) -> Trial:
    """Return the valid trial with the best value of the objective (the only one, if not named); the first of equals."""
    chosen = choose_objective(objectives, name)
    tried = list(trials)
    valid = [trial for trial in tried if trial.may_win]
    if not valid:
        raise MerganserError(nothing(tried))
    return max(valid, key=lambda trial: chosen.sign * trial.objectives[chosen.name])


def top(trials: Iterable[Trial], objective: Objective, count: int) -> list[Trial]:
    """Return the best `count` valid trials with distinct values, the best first."""
    valid = sorted((t for t in trials if t.may_win), key=lambda t: -objective.sign * t.objectives[objective.name])
    return list({trial.label: trial for trial in reversed(valid)}.values())[::-1][:count]


def choose_reranked(trials: Iterable[Trial], full: Iterable[Trial], objective: Objective) -> Trial | None:
    """Return the valid trial whose full evaluation is best at the objective; None if none was fully evaluated."""
    scores = {
        trial.label: objective.value(trial.objectives)
        for trial in full
        if trial.state == "done" and all(measure in trial.objectives for measure in objective.measures)
    }
    known = [trial for trial in trials if trial.valid and trial.label in scores]
    sign = objective.sign
    # Of equals, the one with the better estimate, then the first.
    return max(known, key=lambda t: (sign * scores[t.label], sign * t.objectives[objective.name]), default=None)


def choose_objective(objectives: Sequence[Objective], name: str | None) -> Objective:
    """Return the objective of that name, or the only one."""
    by_name = {objective.name: objective for objective in objectives}
    if name is None and len(by_name) > 1:
        raise InputError(f"several objectives ({', '.join(by_name)}): name one, or ask for the Pareto front")
    chosen = by_name.get(name if name is not None else objectives[0].name)
    if chosen is None:
        raise InputError(f"no objective {name!r}{did_you_mean(str(name), by_name)}")
    return chosen


def pareto(trials: Iterable[Trial], objectives: Sequence[Objective]) -> list[Trial]:
    """Return the valid trials that no other one dominates (no worse in all, better in one), one per set of values."""
    valid = [trial for trial in trials if trial.may_win]
    return _find_front(valid, [[trial.objectives[o.name] for o in objectives] for trial in valid], objectives)


def find_reranked_front(
    trials: Iterable[Trial], full: Iterable[Trial], objectives: Sequence[Objective]
) -> list[Trial] | None:
    """Return the valid trials that no other one dominates by full evaluations; None if none was fully evaluated."""
    measures = {measure for objective in objectives for measure in objective.measures}
    scores = {t.label: t.objectives for t in full if t.state == "done" and measures <= set(t.objectives)}
    known = [trial for trial in trials if trial.valid and trial.label in scores]
    return _find_front(known, [[o.value(scores[t.label]) for o in objectives] for t in known], objectives) or None


def _find_front(
    trials: Sequence[Trial], values: Sequence[Sequence[float]], objectives: Sequence[Objective]
) -> list[Trial]:
    points = np.array(values) * [-o.sign for o in objectives] if trials else np.empty((0, 0))
    front = [
        trial
        for trial, point in zip(trials, points, strict=True)
        if not ((points <= point).all(1) & (points < point).any(1)).any()
    ]
    return list({trial.label: trial for trial in reversed(front)}.values())[::-1]


def spread(valid: Sequence[Trial], objective: Objective, count: int) -> list[Trial]:
    """Return candidates spread evenly over the ranking by an objective, the best one first."""
    unique = list({trial.label: trial for trial in valid}.values())
    ranked = sorted(unique, key=lambda t: -objective.sign * t.objectives[objective.name])
    return [ranked[round(place)] for place in np.linspace(0, len(ranked) - 1, min(count, len(ranked)))]
