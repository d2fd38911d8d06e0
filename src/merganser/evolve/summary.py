"""The results of a study as data: winners with unbiased scores, convergence, estimator error, transfer, cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from merganser.evolve import subsets
from merganser.evolve.arrays import Array
from merganser.evolve.costs import StudyCost
from merganser.evolve.design import Design
from merganser.evolve.estimators import Estimator, compare
from merganser.evolve.intervals import (
    Interval,
    gain_over_best,
    objective_error,
    objective_interval,
    paired_interval,
    score_interval,
    standard_error,
)
from merganser.evolve.objectives import Objective
from merganser.evolve.preparation import Prepared
from merganser.evolve.runfile import RunFile
from merganser.evolve.store import Trial
from merganser.evolve.study import Study

STABILITY_SUBSETS = 20


@dataclass(frozen=True)
class Tested:
    """Scores of a model on unseen items, by measure and by objective, with standard errors, numbers of items and 95
    % intervals. Empty for a model that was not tested.
    """

    test: Mapping[str, float]
    errors: Mapping[str, float]
    objectives: Mapping[str, float]
    objective_errors: Mapping[str, float]
    items: Mapping[str, int]
    intervals: Mapping[str, Interval]


@dataclass(frozen=True)
class Winner(Tested):
    """A winner: its trial with the estimated score, its scores on unseen items, and its transfer by task."""

    trial: Trial
    negative_transfer: Mapping[str, float]


@dataclass(frozen=True)
class Agreement:
    """Estimates compared with full evaluations of the same merges: mean absolute error and rank correlation, and ε
    over many subsets of the same size, chosen as in the study, for every estimator that the task's IRT allows.
    `used` is the study's.
    """

    task: str
    merges: int
    error: float
    spearman: float
    epsilon: Mapping[str, float]
    used: str


@dataclass(frozen=True)
class Summary:
    """The results of a study.

    Attributes:
        winners: The winner, or the Pareto front of several objectives.
        endpoints: The scores of the models and the base on unseen items.
        convergence: By objective, the best estimate after each generation.
        agreement: By task, the error of estimates on merges that were fully evaluated.
        cost: What the study cost.
        states: Numbers of trials that are done, failed and outside the constraints.
        untested: Endpoints whose test failed, with the reasons.
        verdicts: By objective, whether its winner is better than the best endpoint, if that can be told.
        biases: By objective, what quantisation changes, if candidates were quantised.
    """

    winners: tuple[Winner, ...]
    endpoints: Mapping[str, Tested]
    convergence: Mapping[str, tuple[float, ...]]
    agreement: tuple[Agreement, ...]
    cost: StudyCost
    states: Mapping[str, int]
    untested: Mapping[str, str]
    verdicts: Mapping[str, str]
    biases: Mapping[str, str]


def summarize(study: Study) -> Summary:
    """Return everything that a report shows about a study whose search has ended.

    Args:
        study: The study.

    Returns:
        Winners, convergence, estimator errors and costs.

    Example:
        >>> summary = mg.evolve.summarize(mg.evolve.Study.open("study.sqlite"))  # doctest: +SKIP
    """
    design = study.design
    trials = study.trials()
    winners = study.pareto() if len(design.objectives) > 1 else [study.best()]
    tested = {label: _test_answers(study, label) for label in (*design.endpoints, *design.references)}
    endpoints = {label: tested[label] for label in design.endpoints}
    return Summary(
        winners=tuple(_winner(study, trial, endpoints) for trial in winners),
        endpoints={label: Tested(**_list_tested(design, answers)) for label, answers in tested.items()},
        convergence=convergence(study),
        agreement=tuple(a for name, p in study.prepared().items() if (a := agreement(study, name, p))),
        cost=study.cost(),
        verdicts={
            o.name: said for o in design.objectives if (said := describe_comparison(study, o, study.best(o.name)))
        },
        biases=describe_biases(study),
        states={state: sum(t.state == state for t in trials) for state in ("done", "failed", "infeasible")},
        untested={label: error for label in tested if (error := study.test_error(label)) is not None},
    )


def negative_transfer(merged: Array, endpoints: Array) -> float:
    """Return the share of items that some endpoint (row) answers correctly and the merge does not; NaN if there are
    none.
    """
    known = (endpoints == 1).any(0)
    return float((merged[known] != 1).mean()) if known.any() else float("nan")


def convergence(study: Study) -> dict[str, tuple[float, ...]]:
    """Return the best value so far of every objective after each generation."""
    found = {}
    for objective in study.design.objectives:
        better = max if objective.sign > 0 else min
        best: float | None = None
        line: list[float] = []
        generations: dict[int, list[float]] = {}
        for trial in study.trials():
            values = generations.setdefault(trial.generation or 0, [])
            if trial.may_win:
                values.append(trial.objectives[objective.name])
        for values in generations.values():
            best = better([*values, *([] if best is None else [best])], default=None)
            line.append(float("nan") if best is None else best)
        found[objective.name] = tuple(line)
    return found


def agreement(study: Study, task: str, prepared: Prepared) -> Agreement | None:
    """Return the error of estimates on merges; None without at least two full evaluations."""
    full = {t.label: study.store.answers(t)[task].values for t in study.store.trials("full") if t.state == "done"}
    estimated = {t.label: t.estimates[task].value for t in study.trials() if t.valid and task in t.estimates}
    labels = [label for label in full if label in estimated]
    if len(labels) < 2:
        return None
    from scipy.stats import spearmanr  # slow to import

    answers = np.array([full[label] for label in labels])
    truth, guess = answers.mean(1), np.array([estimated[label] for label in labels])
    constant = np.ptp(truth) == 0 or np.ptp(guess) == 0
    return Agreement(
        task,
        len(labels),
        float(np.abs(truth - guess).mean()),
        float("nan") if constant else float(spearmanr(truth, guess).statistic),
        compare(_estimators(prepared.estimator), answers, _draw_subsets(study, task, prepared)),
        prepared.estimator.name,
    )


def _draw_subsets(study: Study, name: str, prepared: Prepared) -> list[subsets.Subset]:
    """Return subsets that the study's extractor would have chosen with other seeds; its own if that is unknown."""
    task = study.design.tasks[name]
    pool, size, irt = prepared.split.pool, len(prepared.subset), prepared.estimator.irt
    seeds = range(STABILITY_SUBSETS)
    if task.extractor == "random":
        return [subsets.random(len(pool), size, seed=seed) for seed in seeds]
    if task.extractor == "stratified" and isinstance(task.strata, tuple):
        return [subsets.stratified([task.strata[i] for i in pool], size, seed=seed) for seed in seeds]
    if task.extractor == "irt" and irt is not None:
        return [subsets.irt_clustering(irt.items, size, seed=seed) for seed in seeds]
    return [prepared.subset]


def _estimators(used: Estimator) -> dict[str, Estimator]:
    if used.irt is None:
        return {"naive": used}
    irt, endpoints, c = used.irt, used.endpoints, used.c
    return {name: Estimator(name, irt, endpoints, c) for name in ("naive", "p-irt", "gp-irt", "mp-irt", "gmp-irt")}


def _winner(study: Study, trial: Trial, endpoints: Mapping[str, Mapping[str, Array]]) -> Winner:
    answers = _test_answers(study, trial.label)
    transfer = {}
    for task in (name for name, each in study.design.tasks.items() if each.direction != "lower"):
        rows = [found[task] for found in endpoints.values() if task in found]
        if task in answers and rows:
            transfer[task] = negative_transfer(answers[task], np.array(rows))
    return Winner(trial=trial, negative_transfer=transfer, **_list_tested(study.design, answers))


def _list_tested(design: Design, answers: Mapping[str, Array]) -> dict[str, Any]:
    test = {measure: float(values.mean()) for measure, values in answers.items()}
    known = [o for o in design.objectives if all(measure in test for measure in o.measures)]
    return {
        "test": test,
        "errors": {measure: standard_error(values) for measure, values in answers.items()},
        "objectives": {o.name: o.value(test) for o in known},
        "objective_errors": {o.name: objective_error(o, answers) for o in known},
        "items": {measure: len(values) for measure, values in answers.items()},
        "intervals": _intervals(design, answers),
    }


def _test_answers(study: Study, label: str, kind: str = "test") -> dict[str, Array]:
    tested = [t for t in study.store.trials(kind, label) if t.state == "done"]
    return {m: a.values for m, a in study.store.answers(tested[-1]).items()} if tested else {}


def list_tested_endpoints(summary: Summary) -> list[tuple[str, Tested]]:
    """Return the endpoints that were tested."""
    return [(label, tested) for label, tested in summary.endpoints.items() if tested.test]


def unseen_intervals(study: Study, label: str) -> dict[str, Interval]:
    """Return the objectives of a trial, or an endpoint, on the test items, then the measures that they combine, with
    95 % intervals; empty if it was not tested.
    """
    return _intervals(study.design, _test_answers(study, label))


def _intervals(design: Design, answers: Mapping[str, Array]) -> dict[str, Interval]:
    known = [o for o in design.objectives if all(measure in answers for measure in o.measures)]
    measures = (measure for objective in known for measure in objective.measures)
    found = {measure: score_interval(answers[measure]) for measure in measures}
    return {o.name: objective_interval(o, answers) for o in known} | {
        measure: interval for measure, interval in found.items() if measure not in {o.name for o in known}
    }


def compare_winner(study: Study, objective: Objective, winner: Trial) -> tuple[str, Interval] | None:
    """Return the best of endpoints and references at an objective on the test items, and by how much the winner is
    better, item by item; None if either was not tested.
    """
    own = _test_answers(study, winner.label)
    others = {label: _test_answers(study, label) for label in (*study.design.endpoints, *study.design.references)}
    known = {label: found for label, found in others.items() if all(m in found for m in objective.measures)}
    if not known or not all(measure in own for measure in objective.measures):
        return None
    return gain_over_best(objective, own, known)


def describe_comparison(study: Study, objective: Objective, winner: Trial) -> str:
    """Return a sentence on whether a winner is better than the best endpoint on unseen items."""
    found = compare_winner(study, objective, winner)
    if found is None:
        return ""
    label, gain = found
    said = {
        "better": f"the winner is better than the best endpoint, {label}",
        "worse": f"the winner is worse than the best endpoint, {label}",
        "cannot tell": f"cannot tell whether the winner is better than the best endpoint, {label}",
    }[gain.verdict]
    return (
        f"By {objective.name}, on unseen items: {said}; item by item the gain is {gain.value:+.3f}, 95 % interval "
        f"{gain.low:+.3f} to {gain.high:+.3f}."
    )


def quantization_bias(study: Study, objective: Objective) -> Interval | None:
    """Return by how much quantised endpoints are better than the same in full precision, on the test items.

    Every item counts once, with the mean of the endpoints. None if candidates were not quantised, or no endpoint was
    asked both ways.
    """
    pairs = [
        (quantized, exact)
        for label in study.design.endpoints
        if (quantized := _test_answers(study, label, "quantized")) and (exact := _test_answers(study, label))
    ]
    if not pairs:
        return None
    left, right = (
        {measure: np.mean([each[measure] for each in rows], 0) for measure in objective.measures}
        for rows in zip(*pairs, strict=True)
    )
    return paired_interval(objective, left, right)


def describe_biases(study: Study) -> dict[str, str]:
    """Return a sentence for each objective on what quantisation changes; none if candidates were not quantised."""
    return {
        objective.name: (
            f"Candidates were asked in {study.design.model.quantize}. On unseen items the endpoints are better by "
            f"{bias.value:+.3f} of {objective.name} than in full precision, 95 % interval {bias.low:+.3f} to "
            f"{bias.high:+.3f}. All scores on unseen items are in full precision."
        )
        for objective in study.design.objectives
        if isinstance(study.design, RunFile) and (bias := quantization_bias(study, objective)) is not None
    }
