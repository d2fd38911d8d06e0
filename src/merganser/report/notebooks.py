"""HTML representations of objects in notebooks: the parts of their reports."""

from __future__ import annotations

from functools import singledispatch
from pathlib import Path
from typing import Any

from merganser.align.universes import Universe
from merganser.analysis.landscape import Plane, Segment
from merganser.checkpoints.base import Checkpoint
from merganser.engine.merge import Merge
from merganser.engine.plan import Plan
from merganser.evaluate.models import Evaluation
from merganser.evolve.study import Study
from merganser.interference.records import Survey
from merganser.library.library import Library
from merganser.report import autopilots, contents, evaluations, interference, libraries, plans, studies, sweeps
from merganser.report.landscapes import plane_chart, segment_chart
from merganser.report.page import Page
from merganser.report.tables import Table
from merganser.tuning.autopilot.decisions import Decision
from merganser.tuning.sweep import Sweep

#: Rows of a table that a notebook shows unfolded.
SHOWN = 12


def render(shown: object) -> str:
    """Return an object as a piece of HTML.

    Args:
        shown: A checkpoint, plan, library, survey, universe, segment, plane, sweep, decision, study or evaluation.

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
    page.items(f"{label}: {value}" for label, value in plans.facts(plans.summarise_plan(shown)))


@fill.register
def _(shown: Library, page: Page) -> None:
    libraries.fill(page, Path(shown.path), False)


@fill.register
def _(shown: Survey, page: Page) -> None:
    page.items(
        [*interference.describe_left_out(shown), *interference.describe_sampled(shown), *(a.text for a in shown.advice)]
    )
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
def _(shown: Segment, page: Page) -> None:
    page.items([f"barrier {shown.barrier:.4g}, above the chord {shown.barrier_above_chord:.4g}"])
    page.chart(segment_chart({"loss": shown.to_dict()}))


@fill.register
def _(shown: Plane, page: Page) -> None:
    page.chart(plane_chart(shown.to_dict(), ["first", "second", "third"]))


@fill.register
def _(shown: Sweep, page: Page) -> None:
    _add(page, sweeps.variant_table((trial.score, trial.budget, trial.values) for trial in shown.trials))


@fill.register
def _(shown: Decision, page: Page) -> None:
    autopilots.fill_decision(page, shown.to_dict())


@fill.register
def _(shown: Study, page: Page) -> None:
    studies.fill_study(page, shown)


@fill.register
def _(shown: Evaluation, page: Page) -> None:
    page.items(evaluations.remarks(shown))
    for table in evaluations.tables(shown):
        _add(page, table)


def _add(page: Page, table: Table) -> None:
    page.add(table, folded=len(table.rows) > SHOWN)
