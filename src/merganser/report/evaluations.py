"""The result of `evaluate`: its checks and scores as tables, for terminals and notebooks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from merganser.report.tables import Table

if TYPE_CHECKING:
    from merganser.evaluate.models import Evaluation


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
