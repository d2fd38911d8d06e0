"""The page of a study, written onto whatever takes headings, paragraphs, tables and figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from merganser.errors import MissingExtraError, require
from merganser.evolve.design import Objective
from merganser.evolve.store import Trial
from merganser.evolve.study import Study
from merganser.evolve.summary import Summary, Tested, summarize


class Page(Protocol):
    """`merganser.report.Page`, or anything that does the same."""

    def heading(self, text: str) -> None: ...

    def text(self, text: str) -> None: ...

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[object]], caption: str = "") -> None: ...

    def figure(self, figure: Any, caption: str = "") -> None: ...


def fill(shown: Page, study: Study) -> None:
    """Winners with honest scores, convergence, Pareto front, estimator error, transfer, cost, every trial."""
    summary = summarize(study)
    design = study.design
    shown.text(
        f"{design.algorithm} over {len(design.space.variables)} variables; {sum(summary.states.values())} trials, "
        f"{summary.states['failed']} failed, {summary.states['infeasible']} outside the constraints.\n\n"
        "A winner's estimated value is optimistic, since it won by it. Its score is the one on the test items, which "
        "neither the search nor the calibration of the estimator has seen.",
    )
    _winners(shown, study, summary)
    shown.heading("Convergence")
    rows = [
        [g + 1, *(line[g] for line in summary.convergence.values())]
        for g in range(len(next(iter(summary.convergence.values()))))
    ]
    shown.table(["generation", *summary.convergence], rows, "Best estimate so far")
    _plot(shown, study, summary)
    _agreement(shown, summary)
    cost = summary.cost
    shown.heading("Cost")
    shown.text(
        f"{cost.asked} questions were asked of candidates and {cost.calibration} of endpoints for calibration, where "
        f"full evaluation of every candidate would have asked {cost.full}: {cost.saved:.1f} times fewer, and about as "
        f"many times fewer FLOPs. Evaluation took {cost.seconds:.0f} s of one worker."
    )
    trials(shown, study)


def _winners(shown: Page, study: Study, summary: Summary) -> None:
    shown.heading("Winners on unseen items")
    measures = sorted({measure for winner in summary.winners for measure in winner.test})
    sums = [o.name for o in study.design.objectives if o.weights != {o.name: 1.0}]
    models = [*((_name(winner.trial), winner) for winner in summary.winners), *endpoints(summary)]
    rows = [[name, *_scores(tested, sums, measures)] for name, tested in models]
    columns = ["model", *(column for name in [*sums, *measures] for column in (name, f"± {name}"))]
    counts = {m: n for winner in summary.winners for m, n in winner.items.items()}
    items = ", ".join(f"{count} of {measure}" for measure, count in sorted(counts.items()))
    shown.table(columns, rows, f"Means and standard errors over the test items: {items or 'not tested yet'}")
    if len(study.design.objectives) == 1 and (verdict := compared(study.design.objectives[0], summary)):
        shown.text(verdict)
    for label, error in summary.untested.items():
        shown.text(f"{label} could not be asked the test items, so it is not compared: {error}")
    names = [variable.name for variable in study.design.space.variables]
    values = [[_name(w.trial), *((w.trial.values or {}).get(name, "") for name in names)] for w in summary.winners]
    shown.table(["model", *names], values, "Their values")
    tasks = list(dict.fromkeys(task for winner in summary.winners for task in winner.negative_transfer))
    if tasks:
        lost = [
            [_name(w.trial), *(w.negative_transfer.get(task, float("nan")) for task in tasks)] for w in summary.winners
        ]
        caption = (
            "Negative transfer: of the test items some endpoint answers rightly, the share that the winner does not"
        )
        shown.table(["model", *tasks], lost, caption)


def endpoints(summary: Summary) -> list[tuple[str, Tested]]:
    """Those that were tested."""
    return [(label, tested) for label, tested in summary.endpoints.items() if tested.test]


def compared(objective: Objective, summary: Summary) -> str:
    """Whether the winner of a study of one objective is better than the best endpoint, on unseen items."""
    [winner] = summary.winners
    name = objective.name
    known = [(label, tested) for label, tested in endpoints(summary) if name in tested.objectives]
    if not known or name not in winner.objectives:
        return ""
    sign = 1 if objective.maximize else -1
    label, best = max(known, key=lambda each: sign * each[1].objectives[name])
    gain = sign * (winner.objectives[name] - best.objectives[name])
    verdict = "better than" if gain > 0 else "worse than" if gain < 0 else "as good as"
    return (
        f"By {name} on unseen items the winner, {winner.objectives[name]:.3f} ± {winner.objective_errors[name]:.3f}, "
        f"is {verdict} the best endpoint, {label}, {best.objectives[name]:.3f} ± {best.objective_errors[name]:.3f}."
    )


def _scores(tested: Tested, sums: Sequence[str], measures: Sequence[str]) -> list[float]:
    """Each score followed by its error."""
    of_sums = [(tested.objectives, tested.objective_errors, name) for name in sums]
    of_measures = [(tested.test, tested.errors, name) for name in measures]
    pairs = [(values.get(name), errors.get(name)) for values, errors, name in [*of_sums, *of_measures]]
    return [float("nan") if value is None else value for pair in pairs for value in pair]


def _name(trial: Trial) -> str:
    return f"trial {trial.generation}:{trial.position}"


def _agreement(shown: Page, summary: Summary) -> None:
    if not summary.agreement:
        return
    shown.heading("The estimator against full evaluation")
    shown.text("Measured on merged candidates that got a full evaluation; ε is the mean error over many subsets.")
    names = sorted({name for each in summary.agreement for name in each.epsilon})
    shown.table(
        ["task", "merges", "mean error", "Spearman", *(f"ε {name}" for name in names)],
        [[a.task, a.merges, a.error, a.spearman, *(a.epsilon.get(n, "") for n in names)] for a in summary.agreement],
    )


def _plot(shown: Page, study: Study, summary: Summary) -> None:
    try:
        graphs = require("plotly.graph_objects", "plots")
    except MissingExtraError as error:
        shown.text(f"(plots left out: {error})")
        return
    figure = graphs.Figure()
    for name, line in summary.convergence.items():
        figure.add_scatter(x=list(range(1, len(line) + 1)), y=list(line), mode="lines+markers", name=name)
    figure.update_layout(xaxis_title="generation", yaxis_title="best estimate")
    shown.figure(figure)
    objectives = [objective.name for objective in study.design.objectives]
    if len(objectives) < 2:
        return
    shown.heading("Pareto front")
    figure = graphs.Figure()
    for label, trials in (("tried", [t for t in study.trials() if t.valid]), ("front", study.pareto())):
        figure.add_scatter(
            x=[t.objectives[objectives[0]] for t in trials],
            y=[t.objectives[objectives[1]] for t in trials],
            mode="markers",
            name=label,
        )
    figure.update_layout(xaxis_title=objectives[0], yaxis_title=objectives[1])
    shown.figure(figure)


def trials(shown: Page, study: Study) -> None:
    """Every trial, with its error if it failed."""
    shown.heading("Trials")
    objectives = [objective.name for objective in study.design.objectives]
    names = [variable.name for variable in study.design.space.variables]
    rows = [
        [
            f"{t.generation}:{t.position}",
            t.state,
            *(t.objectives.get(name, "") for name in objectives),
            *((t.values or {}).get(name, "") for name in names),
            t.seconds,
            t.reason,
        ]
        for t in study.trials()
    ]
    estimated = (f"{name}, estimated" for name in objectives)
    shown.table(["trial", "state", *estimated, *names, "seconds", "error"], rows, "Estimates, and values searched over")
