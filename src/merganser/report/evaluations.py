"""The result of `evaluate`: its checks and scores, for terminals, notebooks and pages, and as a stored file."""

from __future__ import annotations

from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any

from merganser.errors import InputError
from merganser.lazy import np
from merganser.report.charts import Dot, dot_plot
from merganser.report.tables import Table
from merganser.strict_json import read_json

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
    return [f"Normalised accuracy {found.normalized:.3f} (1 means as good as the best parent on every task)", verdict]


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
    _compare(page, found)


def is_evaluation(file: Path) -> bool:
    """Return whether a file holds the JSON that `merganser evaluate` prints; only its beginning is read."""
    if file.suffix != ".json":
        return False
    with file.open("rb") as opened:
        start = opened.read(1 << 12)
    return start.lstrip().startswith(b'{"path"') and b'"verdict"' in start and b'"checks"' in start


def fill_file(page: Page, file: Path, check: bool) -> dict[str, Any]:
    """Add the result of `evaluate` that a file holds, and return its verdict and scores.

    Raises:
        InputError: If the file is damaged.
    """
    found = read_evaluation(file)
    page.items(f"{line}." for line in reversed(remarks(found)))
    for table in tables(found):
        page.add(table)
    _compare(page, found)
    scores = {"perplexity": found.scores.perplexity, **found.scores.tasks}
    return {"kind": "evaluation", "model": found.path, "verdict": found.verdict, "scores": scores}


def read_evaluation(file: Path) -> Evaluation:
    """Read the JSON that `merganser evaluate` prints.

    Args:
        file: The file that it was redirected to.

    Raises:
        InputError: If the file is damaged.

    Example:
        >>> read_evaluation(Path("merged.evaluation.json")).verdict  # doctest: +SKIP
    """
    from merganser.evaluate.models import Evaluation, Scores
    from merganser.evaluate.verdicts import Check

    try:
        content = read_json(file)
        checks = tuple(Check(each["name"], each["status"], each["message"]) for each in content["checks"])
        parents = {label: Scores(**each) for label, each in content["parents"].items()}
        found = Evaluation(**content | {"checks": checks, "parents": parents, "scores": Scores(**content["scores"])})
        scores = [v for each in (found.scores, *parents.values()) for v in (each.perplexity, *each.tasks.values())]
        if not all(type(value) in (int, float, NoneType) for value in (found.normalized, *scores)):
            raise ValueError("a score is not a number")
        if not all(type(value) is int for value in found.questions.values()):
            raise ValueError("a number of questions is not a number")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"{file}: not the JSON of `merganser evaluate`, or damaged ({error})") from None
    return found


def _compare(page: Page, found: Evaluation) -> None:
    """Add a picture of every task, with the model beside its parents."""
    models = {found.path: found.scores, **found.parents}
    for task in found.scores.tasks:
        scores = {label: score for label, each in models.items() if (score := each.tasks.get(task)) is not None}
        dots = [_dot(label, score, found.questions.get(task)) for label, score in scores.items()]
        if not dots:
            continue
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
