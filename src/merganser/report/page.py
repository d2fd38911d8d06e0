"""One self-contained HTML page: text, sortable tables, interactive plots; no network, tables remain without scripts."""

from __future__ import annotations

import html
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from merganser.errors import InputError, MissingExtraError, require
from merganser.report.tables import Link, Table, show

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --accent: #2a78d6; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; padding: 1rem; max-width: 62rem; }
h1, h2, h3, p, li, summary { overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2rem; } h3 { font-size: 1rem; margin-top: 1.5rem; }
section { margin-top: 3rem; border-top: 2px solid var(--line); } section > h2 { font-size: 1.35rem; margin-top: 1rem; }
.up { float: right; margin: .3rem 0 0 1rem; font-size: .85rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
caption { text-align: left; padding: .3rem 0; color: GrayText; }
th, td { padding: .25rem .7rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
.overview th, .overview td { text-align: left; vertical-align: top; padding: .25rem .4rem; }
.overview td:not([data-value]) { white-space: normal; overflow-wrap: break-word; }
.overview td:first-child { max-width: 18rem; }
@media (max-width: 40rem) {
  .overview thead { display: none; }
  .overview, .overview caption, .overview tbody, .overview tr { display: block; }
  .overview tr { padding: .4rem 0; border-bottom: 1px solid var(--line); }
  .overview td { display: inline; border: 0; padding: 0 .6rem 0 0; }
  .overview td:first-child { display: block; max-width: none; overflow-wrap: anywhere; }
  .overview td:empty { display: none; }
  .overview td:not(:first-child)::before { content: attr(data-column) " "; color: GrayText; font-size: .85rem; }
}
summary { cursor: pointer; padding: .3rem 0; }
th[role] { cursor: pointer; }
th[aria-sort=ascending]::after { content: " ▲"; }
th[aria-sort=descending]::after { content: " ▼"; }
td.best { font-weight: 700; color: var(--accent); }
pre { overflow-x: auto; padding: .7rem; border: 1px solid var(--line); border-radius: 6px; }
.figure { min-height: 20rem; }
"""

_SORT = """
for (const table of document.querySelectorAll("table")) table.querySelectorAll("th").forEach((head, column) => {
  head.setAttribute("role", "button"); head.tabIndex = 0;
  const sort = () => {
    const down = head.getAttribute("aria-sort") !== "descending";
    table.querySelectorAll("th").forEach(h => h.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const value = row => row.cells[column].dataset.value ?? row.cells[column].textContent;
    const compare = (x, y) => x === "" || y === "" || isNaN(x) || isNaN(y)
      ? x.localeCompare(y, undefined, {numeric: true}) : x - y;
    const rows = [...table.tBodies[0].rows].sort((a, b) => compare(value(a), value(b)) * (down ? -1 : 1));
    table.tBodies[0].append(...rows);
  };
  head.addEventListener("click", sort);
  head.addEventListener("keydown", event => { if (event.key === "Enter") sort(); });
});
"""

_LOOK = {
    "paper_bgcolor": "rgba(0,0,0,0)",
    "plot_bgcolor": "rgba(0,0,0,0)",
    "font_color": "#808080",
    "colorway": ["#2a78d6", "#e07b39", "#3a9d5d", "#9b59b6", "#c0392b", "#7f8c8d", "#d4a017", "#16a085"],
    "margin": {"l": 10, "r": 10, "t": 20, "b": 10},
    "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
}
_AXIS = {"gridcolor": "#8884", "zerolinecolor": "#8884", "automargin": True}
_WITHOUT_SCRIPTS = "<noscript><p>Plots need scripts; the tables hold the same numbers.</p></noscript>"


class Page:
    """Collects the parts of a page; `write` puts them into one file."""

    def __init__(self, title: str, intro: str = "") -> None:
        self.title = title
        self._parts: list[str] = []
        self._plots = False
        self._anchors: set[str] = set()
        self._level = 2
        if intro:
            self.text(intro)
        self._top = len(self._parts)

    def heading(self, text: str) -> None:
        """Of the second level, inside a part of the third."""
        self._parts.append(self._heading(text, self._anchor(text)))

    @contextmanager
    def part(self, title: str) -> Iterator[str]:
        """What is written inside belongs to one thing of several on the page; gives the anchor that a `Link` takes."""
        anchor = self._anchor(title)
        self._parts.append(f'<section><a class="up" href="#top">top ↑</a>{self._heading(title, anchor)}')
        self._level += 1
        yield anchor
        self._level -= 1
        self._parts.append("</section>")

    def overview(self, columns: Sequence[str], rows: Sequence[Sequence[object]], caption: str = "") -> None:
        """A table above everything but the introduction, whenever it is made; links in it are the page's contents."""
        self._parts.insert(self._top, _table(columns, rows, caption, kind="overview"))

    def _heading(self, text: str, anchor: str) -> str:
        return f'<h{self._level} id="{anchor}">{html.escape(text)}</h{self._level}>'

    def _anchor(self, text: str) -> str:
        """An id that no other heading of the page has; "top" means the top of the page to a browser."""
        stem = re.sub(r"\W+", "-", text.lower()).strip("-") or "part"
        anchor, number = stem, 1
        while anchor in self._anchors or anchor == "top":
            number += 1
            anchor = f"{stem}-{number}"
        self._anchors.add(anchor)
        return anchor

    def text(self, text: str) -> None:
        self._parts.extend(f"<p>{html.escape(paragraph)}</p>" for paragraph in text.split("\n\n") if paragraph.strip())

    def items(self, lines: Iterable[str]) -> None:
        self._parts.append("<ul>" + "".join(f"<li>{html.escape(line)}</li>" for line in lines) + "</ul>")

    def code(self, text: str) -> None:
        self._parts.append(f"<pre>{html.escape(text)}</pre>")

    def table(
        self,
        columns: Sequence[str],
        rows: Sequence[Sequence[object]],
        caption: str = "",
        best: Mapping[str, str] | None = None,
    ) -> None:
        """Numbers are shown to three significant places and sorted by value; `best` marks the "max" or "min" of
        a column."""
        self._parts.append(_table(columns, rows, caption, best))

    def add(self, table: Table, *, folded: bool = False) -> None:
        """A table made elsewhere; a folded one shows its caption and length until it is opened."""
        if not folded:
            self.table(table.columns, table.rows, table.caption)
            return
        summary = f"<summary>{html.escape(table.caption)}: {len(table.rows)} rows</summary>"
        self._parts.append(f"<details>{summary}{_table(table.columns, table.rows)}</details>")

    def draw(self, make: Callable[[], Any], caption: str = "") -> None:
        """The plotly figure that `make` returns. Without the `plots` extra the page says so and its tables carry the
        numbers."""
        try:
            self.figure(make(), caption)
        except MissingExtraError as error:
            self.text(f"(plot left out: {error})")

    def figure(self, figure: Any, caption: str = "") -> None:
        """A plotly figure, in colours that go with a light and a dark page, and margins that go with a phone."""
        plotly = require("plotly.io", "plots")
        figure = require("plotly.graph_objects", "plots").Figure(figure)
        figure.update_layout(**_LOOK)
        figure.update_xaxes(**_AXIS)
        figure.update_yaxes(**_AXIS)
        script = False if self._plots else "inline"
        self._plots = True
        body = plotly.to_html(
            figure, full_html=False, include_plotlyjs=script, config={"responsive": True, "displayModeBar": False}
        )
        note = f"<p><small>{html.escape(caption)}</small></p>" if caption else ""
        self._parts.append(f'<div class="figure">{body}{note}</div>')

    def render(self) -> str:
        title = html.escape(self.title)
        return (
            '<!doctype html><html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{title}</title><style>{_STYLE}</style>"
            "<noscript><style>.figure { display: none; }</style></noscript></head>"
            f"<body><h1>{title}</h1>"
            f"{_WITHOUT_SCRIPTS if self._plots else ''}"
            f"{''.join(self._parts)}<script>{_SORT}</script></body></html>\n"
        )

    def write(self, path: str | os.PathLike[str]) -> Path:
        file = Path(path)
        check_place(file)
        file.write_text(self.render(), encoding="utf-8")
        return file


def check_place(file: Path, option: str = "") -> None:
    """Whether a page can be written there; asked before there is one. `option` is the command's that says where."""
    said = f"{option} {file}".strip()
    if file.is_dir():
        raise InputError(f"{said}: a directory; name the page to be written in it")
    if not file.resolve().parent.is_dir():
        raise InputError(f"{said}: no directory {file.resolve().parent}")


_NOTHING = object()


def _table(
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    caption: str = "",
    best: Mapping[str, str] | None = None,
    kind: str = "",
) -> str:
    winners = {columns.index(name): _winner(rows, columns.index(name), which) for name, which in (best or {}).items()}
    head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
    # An overview is a list on a phone, where its head is gone: each cell knows its column.
    names = columns if kind == "overview" else [""] * len(columns)
    body = "".join(
        f"<tr>{''.join(_cell(value, value == winners.get(i, _NOTHING), names[i]) for i, value in enumerate(row))}</tr>"
        for row in rows
    )
    title = f"<caption>{html.escape(caption)}</caption>" if caption else ""
    mark = f' class="{kind}"' if kind else ""
    table = f"<table{mark}>{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="scroll">{table}</div>'


def _winner(rows: Sequence[Sequence[object]], column: int, kind: str) -> object:
    values = [row[column] for row in rows if isinstance(row[column], (int, float))]
    return (max if kind == "max" else min)(values) if values else _NOTHING  # type: ignore[type-var]


def _cell(value: object, best: bool, column: str = "") -> str:
    mark = ' class="best"' if best else ""
    exact = f' data-value="{value!r}"' if isinstance(value, float) else ""
    named = f' data-column="{html.escape(column)}"' if column else ""
    text = html.escape(show(value))
    if isinstance(value, Link):
        text = f'<a href="#{value.anchor}">{text}</a>'
    return f"<td{mark}{exact}{named}>{text}</td>"
