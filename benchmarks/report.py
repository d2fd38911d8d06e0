"""Builds docs/results.md and its figures from stored results alone.

    python -m benchmarks.report [--check]

Every number comes from `benchmarks/results/*.json`, which the benchmarks write with `--json`; what has not been
measured is left out. `--check` writes nothing and fails if something is out of date.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.records import RESULTS, stored
from benchmarks.reporting import drawing, markdown
from benchmarks.reporting.parts import Figure
from benchmarks.reporting.sections import SECTIONS, others

DOCS = Path(__file__).parents[1] / "docs"
INTRO = """
Measured on the machine named under each section, good or bad, with the command to measure it again. This page is made
by `make results` from the files in [benchmarks/results](../benchmarks/results); a test fails when they disagree.
Models are small enough to be trained on two cores (`benchmarks/zoo/`), so accuracies are those of this scale.
"""


def build() -> tuple[str, list[Figure]]:
    """The page, and the figures it shows."""
    blocks, figures, contents = [], [], []
    for section in (*SECTIONS, *others(path.stem for path in RESULTS.glob("*.json"))):
        record = stored(section.record)
        if record is None:
            continue
        anchor = "".join(c for c in section.title.lower().replace(" ", "-") if c.isalnum() or c in "-_")
        contents.append(f"- [{section.title}](#{anchor})")
        blocks.append(f"## {section.title}")
        for part in section.make(record["results"]):
            blocks.append(markdown.write(part))
            if isinstance(part, Figure):
                figures.append(part)
        blocks.append(markdown.provenance(section.record, record))
    page = ["# Results", markdown.paragraph(INTRO), "\n".join(contents), *blocks]
    return "\n\n".join(page) + "\n", figures


def drawing_of(figure: Figure) -> Path:
    return DOCS / "images" / f"{figure.name}.svg"


def stale(page: str, figures: list[Figure]) -> list[Path]:
    """Files that are missing, or that say something else than the stored results."""
    found = []
    target = DOCS / "results.md"
    if not target.exists() or target.read_text(encoding="utf-8") != page:
        found.append(target)
    for figure in figures:
        path = drawing_of(figure)
        if not path.exists() or not drawing.shows(path.read_text(encoding="utf-8"), figure):
            found.append(path)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="fail if a file is out of date; write nothing")
    parser.add_argument("--redraw", action="store_true", help="draw every figure, also those that are up to date")
    options = parser.parse_args()
    page, figures = build()
    old = stale(page, figures)
    if options.check:
        if old:
            sys.exit(f"out of date: {', '.join(path.name for path in old)}; run make results")
        return
    (DOCS / "images").mkdir(exist_ok=True)
    (DOCS / "results.md").write_text(page, encoding="utf-8")
    for figure in figures:
        if options.redraw or drawing_of(figure) in old:
            drawing_of(figure).write_text(drawing.render(figure), encoding="utf-8")


if __name__ == "__main__":
    main()
