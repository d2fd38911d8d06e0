"""The page of `merganser lineage`: the graph of a model's ancestors, and the licences."""

from __future__ import annotations

import html
from typing import Any

from merganser.excerpts import shorten
from merganser.origin.family import FamilyTree, describe
from merganser.origin.lock_file import Ancestor
from merganser.report.page import Page

_WIDTH, _HEIGHT, _ACROSS, _DOWN, _LETTERS = 210, 44, 290, 60, 28
_STYLE = (
    "<style>.family text { font: 13px system-ui, sans-serif; fill: currentColor; } .family .said { font-size: 11px; "
    "opacity: .75; } .family rect { fill: none; stroke: var(--accent); } .family path { fill: none; "
    "stroke: var(--line); stroke-width: 2; }</style>"
)


def lineage_page(family: FamilyTree) -> Page:
    """Return a page with the graph, the tree as text, and the licences.

    Args:
        family: A tree from `mg.origin.trace`.

    Example:
        >>> from merganser.report.lineage import lineage_page
        >>> lineage_page(mg.origin.trace(mg.run("recipe.yml", "out/"))).title
        'Lineage of out'
    """
    page = Page(f"Lineage of {family.root.label}", "The models that the model was made from, and their own sources.")
    page.chart(_STYLE + draw(family.root))
    page.heading("Licences")
    page.table(["licence", "models"], [[licence, ", ".join(labels)] for licence, labels in family.licences.items()])
    if family.conflicts:
        page.heading("Conflicts")
        page.items(family.conflicts)
    if notes := [*family.terms, *family.notes]:
        page.heading("Notes")
        page.items(notes)
    page.heading("As text")
    page.code("\n".join(family.lines()))
    return page


def draw(root: Ancestor) -> str:
    """Return the graph as SVG: the output on the left, each model once, to the right of everything made from it."""
    nodes: dict[Any, Ancestor] = {}
    columns: dict[Any, int] = {}
    edges: dict[tuple[Any, Any], None] = {}

    def visit(ancestor: Ancestor, column: int) -> Any:
        key = _identity(ancestor)
        nodes.setdefault(key, ancestor)
        columns[key] = max(column, columns.get(key, 0))
        for each in ancestor.made_of:
            edges[key, visit(each, column + 1)] = None
        return key

    visit(root, 0)
    rows: dict[int, int] = {}
    places = {}
    for key, column in columns.items():
        places[key] = (column * _ACROSS + 5, rows.get(column, 0) * _DOWN + 5)
        rows[column] = rows.get(column, 0) + 1
    lines = [_draw_curve(places[one], places[other]) for one, other in edges]
    boxes = [_draw_box(nodes[key], *places[key]) for key in nodes]
    width, height = (max(columns.values()) * _ACROSS) + _WIDTH + 10, max(rows.values()) * _DOWN
    shape = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    label = html.escape(f"{root.label} descends from {len(nodes) - 1} models")
    return (
        f'<div class="scroll" tabindex="0"><svg class="family" {shape} role="img" aria-label="{label}">'
        f"{''.join(lines)}{''.join(boxes)}</svg></div>"
    )


def _identity(ancestor: Ancestor) -> Any:
    return ancestor.lock or (ancestor.label, ancestor.repository, ancestor.revision, ancestor.files, ancestor.methods)


def _draw_curve(one: tuple[int, int], other: tuple[int, int]) -> str:
    x, y, to_x, to_y = one[0] + _WIDTH, one[1] + _HEIGHT // 2, other[0], other[1] + _HEIGHT // 2
    middle = (x + to_x) // 2
    return f'<path d="M{x},{y} C{middle},{y} {middle},{to_y} {to_x},{to_y}"/>'


def _draw_box(ancestor: Ancestor, x: int, y: int) -> str:
    said = ", ".join([*(ancestor.methods or (ancestor.kind,)), *([ancestor.licence] if ancestor.licence else [])])
    return (
        f'<g transform="translate({x},{y})"><title>{html.escape(describe(ancestor))}</title>'
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" rx="6"/>'
        f'<text x="8" y="18">{html.escape(shorten(ancestor.label, _LETTERS, "end"))}</text>'
        f'<text x="8" y="35" class="said">{html.escape(shorten(said, _LETTERS, "end"))}</text></g>'
    )
