"""One self-contained HTML page: text, charts and sortable tables. Needs no network; without scripts only sorting is
missing.
"""

from __future__ import annotations

import html
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from merganser.engine.directories import check_file
from merganser.report import charts
from merganser.report.tables import Link, Table, show

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --accent: #1f6fc4; --soft: #5f6368; }
@media (prefers-color-scheme: dark) { :root { --accent: #6ab0f3; --soft: #a9b0b7; } }
html { background: Canvas; color: CanvasText; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; padding: 1rem; max-width: 62rem; }
h1, h2, h3, p, li, summary { overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2rem; } h3 { font-size: 1rem; margin-top: 1.5rem; }
section { margin-top: 3rem; border-top: 2px solid var(--line); } section > h2 { font-size: 1.35rem; margin-top: 1rem; }
.up { float: right; margin: .3rem 0 0 1rem; font-size: .85rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin-bottom: 1rem; }
caption { text-align: left; padding: .3rem 0; color: var(--soft); min-width: min(26rem, 88vw); }
th, td { padding: .25rem .7rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child, td:first-child, .t { text-align: left; }
.overview th, .overview td { text-align: left; vertical-align: top; padding: .25rem .4rem; }
.overview td:not([data-value]) { white-space: normal; overflow-wrap: break-word; }
.overview td:first-child { max-width: 18rem; }
@media (max-width: 40rem) {
  caption { position: sticky; left: 0; max-width: 88vw; }
  td:first-child { white-space: normal; overflow-wrap: anywhere; min-width: 9rem; }
  .overview thead { display: none; }
  .overview, .overview caption, .overview tbody, .overview tr { display: block; }
  .overview tr { padding: .4rem 0; border-bottom: 1px solid var(--line); }
  .overview td { display: inline; border: 0; padding: 0 .6rem 0 0; }
  .overview td:first-child { display: block; max-width: none; overflow-wrap: anywhere; }
  .overview td:empty { display: none; }
  .overview td:not(:first-child)::before { content: attr(data-column) " "; color: var(--soft); font-size: .85rem; }
}
summary { cursor: pointer; padding: .3rem 0; }
th button { all: unset; cursor: pointer; } th button:focus-visible { outline: 2px solid var(--accent); }
th[aria-sort=ascending] button::after { content: " ▲"; }
th[aria-sort=descending] button::after { content: " ▼"; }
td.best { font-weight: 700; color: var(--accent); }
pre { overflow-x: auto; padding: .7rem; border: 1px solid var(--line); border-radius: 6px; }
"""

_SORT = """
for (const table of document.querySelectorAll("table")) table.querySelectorAll("thead th").forEach((head, column) => {
  const button = document.createElement("button");
  button.append(...head.childNodes); head.append(button);
  button.addEventListener("click", () => {
    const down = head.getAttribute("aria-sort") !== "descending";
    table.querySelectorAll("th").forEach(h => h.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const value = row => row.cells[column].dataset.value ?? row.cells[column].textContent;
    const compare = (x, y) => x === "" || y === "" || isNaN(x) || isNaN(y)
      ? x.localeCompare(y, undefined, {numeric: true}) : x - y;
    const rows = [...table.tBodies[0].rows].sort((a, b) => compare(value(a), value(b)) * (down ? -1 : 1));
    table.tBodies[0].append(...rows);
  });
});
"""


class Page:
    """A report as a single HTML file, which needs no network.

    Args:
        title: The title of the page.
        intro: A paragraph under the title.

    Example:
        >>> page = mg.report.Page("Two merges", "Accuracy on held-out items.")
        >>> page.table(["method", "accuracy"], [["tsv", 0.91], ["ties", 0.88]])
        >>> page.write("merges.html")
    """

    def __init__(self, title: str, intro: str = "") -> None:
        self.title = title
        self._parts: list[str] = []
        self._anchors: set[str] = set()
        self._level = 2
        if intro:
            self.text(intro)
        self._top = len(self._parts)

    def heading(self, text: str) -> None:
        """Add a heading, one level deeper inside a part."""
        self._parts.append(self._heading(text, self._anchor(text)))

    @contextmanager
    def part(self, title: str) -> Iterator[str]:
        """Collect what is added inside the block under a title; yields the anchor for a `Link`."""
        anchor = self._anchor(title)
        self._parts.append(f'<section><a class="up" href="#top">top ↑</a>{self._heading(title, anchor)}')
        self._level += 1
        yield anchor
        self._level -= 1
        self._parts.append("</section>")

    def overview(self, columns: Sequence[str], rows: Sequence[Sequence[object]], caption: str = "") -> None:
        """Add a table directly below the introduction, at any time; its links are the table of contents."""
        self._parts.insert(self._top, _render_table(columns, rows, caption, kind="overview"))

    def _heading(self, text: str, anchor: str) -> str:
        return f'<h{self._level} id="{anchor}">{html.escape(text)}</h{self._level}>'

    def _anchor(self, text: str) -> str:
        """Return an id that is unique on the page; browsers reserve "top"."""
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
        self._parts.append(f'<pre tabindex="0">{html.escape(text)}</pre>')

    def table(
        self,
        columns: Sequence[str],
        rows: Sequence[Sequence[object]],
        caption: str = "",
        best: Mapping[str, str] | None = None,
    ) -> None:
        """Add a table. Numbers are shown to three significant digits and sorted by value; `best` marks the "max" or
        "min" of a column.
        """
        self._parts.append(_render_table(columns, rows, caption, best))

    def add(self, table: Table, *, folded: bool = False) -> None:
        """Add an existing table; a folded one shows only its caption and length until it is opened."""
        if not folded:
            self.table(table.columns, table.rows, table.caption)
            return
        summary = f"<summary>{html.escape(table.caption)}: {len(table.rows)} rows</summary>"
        self._parts.append(f"<details>{summary}{_render_table(table.columns, table.rows)}</details>")

    def chart(self, chart: str) -> None:
        """Add a chart, made by a function of `merganser.report.charts`."""
        self._parts.append(chart)

    def render(self) -> str:
        title = html.escape(self.title)
        return (
            '<!doctype html><html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{title}</title><style>{_STYLE}{charts.STYLE}</style></head>"
            f"<body><main><h1>{title}</h1>{''.join(self._parts)}</main><script>{_SORT}</script></body></html>\n"
        )

    def fragment(self) -> str:
        """Return the parts without a page, for a notebook; the style affects nothing outside."""
        style = _nest_style(_STYLE + charts.STYLE)
        return f'<div class="merganser"><style>.merganser {{ {style} }}</style>{"".join(self._parts)}</div>'

    def write(self, path: str | os.PathLike[str]) -> Path:
        file = Path(path)
        check_file(file)
        file.write_text(self.render(), encoding="utf-8")
        return file


def _nest_style(style: str) -> str:
    """Return rules that can be nested inside another: the root is that element, and the body is the notebook's."""
    return re.sub(r"^body \{.*\}$", "", style, flags=re.MULTILINE).replace(":root", "&")


_NOTHING = object()
#: The class of cells in columns of text, which are aligned to the left.
_TEXT = ' class="t"'


def _render_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    caption: str = "",
    best: Mapping[str, str] | None = None,
    kind: str = "",
) -> str:
    winners = {
        columns.index(name): _find_winner(rows, columns.index(name), which) for name, which in (best or {}).items()
    }
    texts = [any(isinstance(row[i], (str, Link)) for row in rows) for i in range(len(columns))]
    head = "".join(
        f'<th scope="col"{_TEXT * text}>{html.escape(name)}</th>' for name, text in zip(columns, texts, strict=True)
    )
    # On a phone an overview is a list without a head, so each cell knows its column.
    names = columns if kind == "overview" else [""] * len(columns)
    cells = (
        [_render_cell(v, v == winners.get(i, _NOTHING), names[i], texts[i]) for i, v in enumerate(row)] for row in rows
    )
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in cells)
    title = f"<caption>{html.escape(caption)}</caption>" if caption else ""
    mark = f' class="{kind}"' if kind else ""
    table = f"<table{mark}>{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="scroll" tabindex="0">{table}</div>'


def _find_winner(rows: Sequence[Sequence[object]], column: int, kind: str) -> object:
    values = [row[column] for row in rows if isinstance(row[column], (int, float))]
    return (max if kind == "max" else min)(values) if values else _NOTHING  # type: ignore[type-var]


def _render_cell(value: object, best: bool, column: str = "", text_column: bool = False) -> str:
    mark = ' class="best"' if best else _TEXT * text_column
    large = isinstance(value, int) and abs(value) >= 1000  # shown with separators, which would sort as text
    exact = f' data-value="{value!r}"' if isinstance(value, float) or large else ""
    named = f' data-column="{html.escape(column)}"' if column else ""
    text = html.escape(show(value))
    if isinstance(value, Link):
        text = f'<a href="#{value.anchor}">{text}</a>'
    return f"<td{mark}{exact}{named}>{text}</td>"
