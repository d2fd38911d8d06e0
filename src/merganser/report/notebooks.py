"""HTML representations of objects in notebooks: the parts of their reports."""

from __future__ import annotations

from functools import singledispatch
from pathlib import Path
from typing import Any

from merganser.align.universes import Universe
from merganser.checkpoints.base import Checkpoint
from merganser.engine.merge import Merge
from merganser.engine.plan import Plan
from merganser.evaluate.models import Evaluation
from merganser.evolve.study import Study
from merganser.interference.surveys import Survey
from merganser.library.library import Library
from merganser.report import autopilots, contents, interference, libraries, studies
from merganser.report.page import Page
from merganser.report.tables import Table
from merganser.tuning.autopilot.decisions import Decision
from merganser.tuning.sweep import Sweep

#: Rows of a table that a notebook shows unfolded.
SHOWN = 12


def render(shown: object) -> str:
    """Return an object as a piece of HTML.

    Args:
        shown: A checkpoint, plan, library, survey, universe, sweep, decision, study or evaluation.

    Returns:
        HTML with its own style, which does not affect the surrounding page.

    Raises:
        TypeError: If objects of this type have no report.

    Example:
        >>> from merganser.report.notebooks import render
        >>> text = render(mg.open("math"))
    """
    page = Page(type(shown).__name__)
    fill(shown, page)
    return page.fragment()


@singledispatch
def fill(shown: Any, page: Page) -> None:
    """Add the report of an object to a page."""
    raise TypeError(f"a {type(shown).__name__} has no report")


@fill.register
def _(shown: Checkpoint, page: Page) -> None:
    found = contents.contents(shown)
    page.items([found.label, *contents.facts(found)[:-1]])
    _add(page, contents.blocks_table(found))


@fill.register
def _(shown: Merge, page: Page) -> None:
    fill(shown.plan, page)


@fill.register
def _(shown: Plan, page: Page) -> None:
    methods: dict[str, int] = {}
    for output in shown.outputs:
        methods[output.method] = methods.get(output.method, 0) + 1
    used = ", ".join(f"{name} × {count:,}" for name, count in sorted(methods.items()))
    page.items(
        [
            f"{len(shown.models)} models: {', '.join(model.label for model in shown.models)}",
            f"{len(shown.outputs):,} tensors: {used}",
            f"writes {shown.bytes_out / 2**20:,.1f} MiB",
            *(f"note: {note}" for note in shown.notes),
        ]
    )


@fill.register
def _(shown: Library, page: Page) -> None:
    libraries.fill(page, Path(shown.path), False)


@fill.register
def _(shown: Survey, page: Page) -> None:
    page.items(advice.text for advice in shown.advice)
    if shown.matrices and len(shown.experts) > 1:
        page.chart(interference.sti_chart(shown))
        page.chart(interference.cosine_chart(shown))
    if shown.matrices:
        _add(page, interference.expert_table(shown))


@fill.register
def _(shown: Universe, page: Page) -> None:
    page.items(
        [
            f"{len(shown)} models in one universe, objective {shown.objective:,.6g}",
            f"cycle error {shown.cycle_error():g}",
            *shown.notes,
        ]
    )
    page.code(str(shown.symmetry))


@fill.register
def _(shown: Sweep, page: Page) -> None:
    names = list(dict.fromkeys(name for trial in shown.trials for name in trial.values))
    rows = [[trial.score, *(trial.values.get(name) for name in names)] for trial in shown.trials]
    _add(page, Table(["score", *names], rows, "Every variant, the best first"))


@fill.register
def _(shown: Decision, page: Page) -> None:
    autopilots.fill_decision(page, shown.to_dict())


@fill.register
def _(shown: Study, page: Page) -> None:
    studies.fill_study(page, shown)


@fill.register
def _(shown: Evaluation, page: Page) -> None:
    page.items([f"{shown.path}: {shown.verdict}"])
    _add(page, Table(["check", "status", ""], [[c.name, c.status, c.message] for c in shown.checks], "Checks"))
    tasks = list(shown.scores.tasks)
    models = {"this model": shown.scores, **shown.parents}
    rows = [[name, own.perplexity, *(own.tasks.get(task) for task in tasks)] for name, own in models.items()]
    _add(page, Table(["model", "perplexity", *tasks], rows, "Scores"))


def _add(page: Page, table: Table) -> None:
    page.add(table, folded=len(table.rows) > SHOWN)
