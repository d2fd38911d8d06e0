"""The page of a study of `merganser evolve`; for one that has not ended, its progress."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from merganser.evolve.costs import StudyCost
from merganser.evolve.store import Trial
from merganser.evolve.study import Study
from merganser.evolve.summary import Summary, Tested, list_tested_endpoints, summarize
from merganser.report.charts import Dot, Series, dot_plot, line_chart, parallel_coordinates
from merganser.report.page import Page

#: Variables with an axis of their own in parallel coordinates, and scores with a picture of their intervals.
AXES, MEASURES = 8, 4


def is_study(file: Path) -> bool:
    return file.suffix == ".sqlite" and file.is_file()


def is_database(file: Path) -> bool:
    """Return whether a file is an SQLite database, so that problems of any file a user names can be reported."""
    with file.open("rb") as opened:
        return opened.read(16) == b"SQLite format 3\0"


def fill(page: Page, file: Path, check: bool) -> dict[str, Any]:
    study = Study.open(file, readonly=True)
    try:
        fill_study(page, study)
        return {"kind": "study", "file": file.name, "trials": len(study.trials()), "ended": study.ended}
    finally:
        study.close()


def fill_study(page: Page, study: Study) -> None:
    """Add the results of an open study so far."""
    design, trials = study.design, study.trials()
    if study.failure:
        page.text(f"Failed: {study.failure}. When the cause is gone, resume the run to try again.")
    if any(trial.valid for trial in trials):
        if not study.ended:
            page.text(f"Not ended: {len(trials)} of {design.search.trials} trials. Resume the run for the rest.")
        show(page, study)
    else:
        page.text(f"{len(trials)} of {design.search.trials} trials, none of them with a score yet.")
        _add_trials(page, study)


def show(page: Page, study: Study) -> None:
    """Add winners with unbiased scores, convergence, Pareto front, estimator error, transfer, cost, every trial."""
    summary = summarize(study)
    design = study.design
    for sentence in summary.verdicts.values():
        page.text(sentence)
    page.text(
        f"{sum(summary.states.values())} trials by {design.search.algorithm} over "
        f"{len(design.search_space.variables)} variables, {summary.states['failed']} failed, "
        f"{summary.states['infeasible']} outside the constraints.\n\n"
        "A winner's estimated value is optimistic, since it won by it. Its score is the one on the test items, which "
        "neither the search nor the calibration of the estimator has seen.",
    )
    _add_winners(page, study, summary)
    page.heading("Convergence")
    rows = [
        [g + 1, *(line[g] for line in summary.convergence.values())]
        for g in range(len(next(iter(summary.convergence.values()))))
    ]
    page.table(["generation", *summary.convergence], rows, "Best estimate so far")
    _plot(page, study, summary)
    _add_agreement(page, summary)
    _add_cost(page, summary.cost)
    _add_trials(page, study)


def _add_cost(page: Page, cost: StudyCost) -> None:
    page.heading("Cost")
    page.text(
        f"{cost.asked} questions were asked of candidates, {cost.again} of the best again at the end, and "
        f"{cost.calibration} of endpoints for calibration, where "
        f"full evaluation of every candidate would have asked {cost.full}: {cost.saved:.1f} times fewer. "
        f"{cost.describe()}. Everything took {cost.seconds + cost.fitting:.0f} s of one worker."
    )
    if not any(part.asking for part in cost.parts):  # an evaluator that does not tell
        return
    rows: list[list[object]] = [
        [part.name, part.models, part.questions, part.merging, part.asking, part.flops / 1e12]
        for part in cost.parts
        if part.models
    ]
    columns = ["part", "models", "questions", "seconds of merging", "seconds of asking", "TFLOPs of asking"]
    page.table(columns, rows, "What each part took of one worker")
    page.text(
        f"Loading the models took {cost.loading:.1f} s, choosing the items and fitting the estimators "
        f"{cost.fitting:.1f} s."
    )


def _add_winners(page: Page, study: Study, summary: Summary) -> None:
    page.heading("Winners on unseen items")
    models = [*((_name(winner.trial), winner) for winner in summary.winners), *list_tested_endpoints(summary)]
    scores = dict.fromkeys(score for winner in summary.winners for score in winner.intervals)
    for score in list(scores)[:MEASURES]:
        known = [(name, own.intervals[score]) for name, own in models if score in own.intervals]
        dots = [Dot(name, found.value, found.low, found.high) for name, found in known]
        page.chart(dot_plot(dots, score, caption=f"{score} on unseen items, with 95 % intervals."))
    sums = [o.name for o in study.design.objectives if o.measures != {o.name: 1.0}]
    measures = list(dict.fromkeys(measure for o in study.design.objectives for measure in o.measures))
    rows = [[name, *_scores(tested, sums, measures)] for name, tested in models]
    columns = ["model", *(column for name in [*sums, *measures] for column in (name, f"± {name}"))]
    counts = {m: n for winner in summary.winners for m, n in winner.items.items()}
    items = ", ".join(f"{counts[measure]} of {measure}" for measure in measures if measure in counts)
    page.table(columns, rows, f"Means and standard errors over the test items: {items or 'not tested yet'}")
    for sentence in summary.biases.values():
        page.text(sentence)
    for label, error in summary.untested.items():
        page.text(f"{label} could not be asked the test items, so it is not compared: {error}")
    names = [variable.name for variable in study.design.search_space.variables]
    values = [[_name(w.trial), *((w.trial.values or {}).get(name, "") for name in names)] for w in summary.winners]
    page.table(["model", *names], values, "Their values")
    tasks = list(dict.fromkeys(task for winner in summary.winners for task in winner.negative_transfer))
    if tasks:
        lost = [
            [_name(w.trial), *(w.negative_transfer.get(task, float("nan")) for task in tasks)] for w in summary.winners
        ]
        caption = (
            "Negative transfer: share of the test items that some endpoint answers correctly and the winner does not"
        )
        page.table(["model", *tasks], lost, caption)


def _scores(tested: Tested, sums: Sequence[str], measures: Sequence[str]) -> list[float]:
    """Return each score followed by its error."""
    of_sums = [(tested.objectives, tested.objective_errors, name) for name in sums]
    of_measures = [(tested.test, tested.errors, name) for name in measures]
    pairs = [(values.get(name), errors.get(name)) for values, errors, name in [*of_sums, *of_measures]]
    return [float("nan") if value is None else value for pair in pairs for value in pair]


def _name(trial: Trial) -> str:
    return f"trial {trial.generation}:{trial.position}"


def _add_agreement(page: Page, summary: Summary) -> None:
    if not summary.agreement:
        return
    page.heading("The estimator compared with full evaluation")
    page.text("Measured on merged candidates with a full evaluation; ε is the mean error over many subsets.")
    names = sorted({name for each in summary.agreement for name in each.epsilon})
    page.table(
        ["task", "estimator", "merges", "mean error", "Spearman", *(f"ε {name}" for name in names)],
        [
            [a.task, a.used, a.merges, a.error, a.spearman, *(a.epsilon.get(n, "") for n in names)]
            for a in summary.agreement
        ],
    )


def _plot(page: Page, study: Study, summary: Summary) -> None:
    lines = [Series(name, list(range(1, len(line) + 1)), list(line)) for name, line in summary.convergence.items()]
    page.chart(line_chart(lines, "generation", "best estimate"))
    valid = [trial for trial in study.trials() if trial.valid]
    objectives = [objective.name for objective in study.design.objectives]
    names = [variable.name for variable in study.design.search_space.variables]
    if len(valid) > 1:
        first = study.design.objectives[0]
        scores = [trial.objectives[first.name] for trial in valid]
        kept = _select_variables(names, valid, scores)
        rows = [[(trial.values or {})[name] for name in kept] for trial in valid]
        some = f"The {len(kept)} of {len(names)} variables that go along with the score most." if kept != names else ""
        caption = f"Every trial, by its estimated {first.name}. {some}".strip()
        page.heading("Searched values")
        page.chart(parallel_coordinates(kept, rows, scores, lowest=not first.maximize, caption=caption))
    if len(objectives) < 2:
        return
    page.heading("Pareto front")
    front = sorted(study.pareto(), key=lambda trial: trial.objectives[objectives[0]])
    x, y = objectives[:2]
    points = [
        Series(name, [t.objectives[x] for t in trials], [t.objectives[y] for t in trials], joined=name == "front")
        for name, trials in (("front", front), ("tried", valid))
    ]
    page.chart(line_chart(points, x, y))


def _select_variables(names: list[str], trials: Sequence[Trial], scores: Sequence[float]) -> list[str]:
    """Return the variables to draw: all if they fit, else those whose ranks go along with the score most."""
    if len(names) <= AXES:
        return names
    from scipy.stats import spearmanr  # slow to import

    def strength(name: str) -> float:
        values = [(trial.values or {})[name] for trial in trials]
        known = {value: i for i, value in enumerate(dict.fromkeys(map(str, values)))}
        numbers = [v if isinstance(v, (int, float)) else known[str(v)] for v in values]
        constant = len(set(numbers)) < 2 or len(set(scores)) < 2
        return 0.0 if constant else abs(float(spearmanr(numbers, scores).statistic))

    strongest = sorted(names, key=strength, reverse=True)[:AXES]
    return [name for name in names if name in strongest]


def _add_trials(page: Page, study: Study) -> None:
    """Add every trial, with its error if it failed."""
    page.heading("Trials")
    objectives = [objective.name for objective in study.design.objectives]
    names = [variable.name for variable in study.design.search_space.variables]
    trials = study.trials()
    failed = any(t.reason for t in trials)
    rows = [
        [
            f"{t.generation}:{t.position}",
            "stopped" if t.stopped is not None else t.state,
            *(t.objectives.get(name, "") for name in objectives),
            *((t.values or {}).get(name, "") for name in names),
            t.seconds,
            *([t.reason] if failed else []),
        ]
        for t in trials
    ]
    estimated = (f"{name}, estimated" for name in objectives)
    columns = ["trial", "state", *estimated, *names, "seconds", *(["error"] if failed else [])]
    page.table(columns, rows, "Estimates, and values searched over")
