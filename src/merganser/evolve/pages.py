"""The page of a study, written onto whatever takes headings, paragraphs, tables and figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from merganser.errors import MissingExtraError, require
from merganser.evolve.study import Study
from merganser.evolve.summary import Summary, summarize


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
    _winners(shown, summary)
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
    _trials(shown, study)


def _winners(shown: Page, summary: Summary) -> None:
    shown.heading("Winners on unseen items")
    measures = sorted({measure for winner in summary.winners for measure in winner.test})
    rows: list[list[Any]] = []
    for winner in summary.winners:
        scores = [winner.test.get(m, float("nan")) for m in measures]
        errors = [winner.errors.get(m, float("nan")) for m in measures]
        transfer = list(winner.negative_transfer.values())
        rows.append(
            [
                f"trial {winner.trial.generation}:{winner.trial.position}",
                *scores,
                *errors,
                sum(transfer) / len(transfer) if transfer else float("nan"),
            ]
        )
    for label, scores_of in summary.endpoints.items():
        rows.append([label, *(scores_of.get(m, float("nan")) for m in measures), *([""] * len(measures)), ""])
    columns = ["model", *measures, *(f"± {m}" for m in measures), "negative transfer"]
    shown.table(columns, rows, "Means and standard errors over the test items")
    values = [(w.trial, dict(w.trial.values or {})) for w in summary.winners]
    if values:
        names = list(values[0][1])
        shown.table(
            ["model", *names],
            [[f"trial {t.generation}:{t.position}", *(v[name] for name in names)] for t, v in values],
            "Their values",
        )


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


def _trials(shown: Page, study: Study) -> None:
    shown.heading("Trials")
    objectives = [objective.name for objective in study.design.objectives]
    rows = [
        [
            f"{t.generation}:{t.position}",
            t.state,
            *(t.objectives.get(name, "") for name in objectives),
            t.seconds,
            (t.error or "").splitlines()[0] if t.error else "",
        ]
        for t in study.trials()
    ]
    shown.table(["trial", "state", *objectives, "seconds", "error"], rows)
