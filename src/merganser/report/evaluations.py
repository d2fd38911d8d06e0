"""The result of `evaluate`: its checks and scores, for terminals, notebooks and pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from merganser.lazy import np
from merganser.report.charts import Dot, dot_plot
from merganser.report.tables import Table

if TYPE_CHECKING:
    from merganser.evaluate.models import Evaluation
    from merganser.report.page import Page


def tables(found: Evaluation) -> list[Table]:
    """Return the checks, and the scores of the model and its parents if there are any."""
    shown = [Table(("check", "status", "finding"), [(c.name, c.status, c.message) for c in found.checks], "Checks")]
    tasks = list(found.scores.tasks)
    if tasks or found.scores.perplexity is not None:
        rows = [
            (label, scores.perplexity, *(scores.tasks.get(task) for task in tasks))
            for label, scores in ((found.path, found.scores), *found.parents.items())
        ]
        shown.append(Table(("model", "perplexity", *tasks), rows, "Scores"))
    return shown


def remarks(found: Evaluation) -> list[str]:
    """Return what the tables amount to, the verdict last."""
    verdict = f"{found.path} is {found.verdict}"
    if found.normalized is None:
        return [verdict]
    return [f"normalised accuracy {found.normalized:.3f} (1 means as good as the best parent on every task)", verdict]


def fill(page: Page, found: Evaluation) -> None:
    """Add the checks, the scores, and a picture of every task, below an introduction with the `remarks`.

    Args:
        page: The page.
        found: The result of `evaluate`.

    Example:
        >>> fill(page, mg.evaluate.evaluate("math"))  # doctest: +SKIP
    """
    checks, *scores = tables(found)
    page.overview(checks.columns, checks.rows, checks.caption)
    for table in scores:
        page.add(table)
    models = {found.path: found.scores, **found.parents}
    for task in found.scores.tasks:
        dots = [_dot(label, each.tasks[task], found.questions.get(task)) for label, each in models.items()]
        known = all(dot.low is not None for dot in dots)
        over = f" with 95 % intervals over {found.questions[task]:,} questions" if known else ""
        page.chart(dot_plot(dots, task, caption=f"{task}: the model and its parents{over}."))
    if len(models) > 1 and found.scores.tasks:
        page.text(
            "All models answered the same questions, so that a difference may be real although intervals overlap. The "
            "checks warn of a task if the model is clearly below its worst parent."
        )


def _dot(label: str, score: float, questions: int | None) -> Dot:
    """Return a score with its interval, if it is the share of right answers."""
    from merganser.evolve.intervals import score_interval

    right = round(score * questions) if questions and 0 <= score <= 1 else 0
    if not questions or abs(right / questions - score) > 1e-9:
        return Dot(label, score)
    interval = score_interval(np.repeat([1.0, 0.0], [right, questions - right]))
    return Dot(label, score, interval.low, interval.high)
