"""Builds docs/results.md and its figures from stored results alone.

    python -m benchmarks.report [--check] [--results DIR] [--out DIR]

Every number comes from `benchmarks/results/*.json`, which the benchmarks write with `--json`; what has not been
measured is left out. `--check` writes nothing and fails if something is out of date.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.records import RESULTS
from benchmarks.reporting import drawing, markdown
from benchmarks.reporting.parts import Figure
from benchmarks.reporting.sections import SECTIONS, others

DOCS = Path(__file__).parents[1] / "docs"
INTRO = """
Measured on the machine named under each section, good or bad, with the command to measure it again. This page is made
by `make results` from the files in [benchmarks/results]({results}); a test fails when they disagree. Models are small
enough to be trained on two cores (`benchmarks/zoo/`), so accuracies are those of this scale. *Normalised* accuracy is a
merge's accuracy over that of the expert of the task, mean over tasks; *one standard error* is that of an accuracy over
the test set, √(a(1 − a)/n).

Goals are marked *met* or *not met* where they are measured. Not measured yet on networks that pass the guards
(training has moved their weights: the median cosine with the initial ones is at most 0.6) are alignment of ResNet20,
VGG11 and a patch transformer on CIFAR-10, several image tasks in one backbone, three skills in one language model, and
federated training of a CNN; `make zoo` trains these networks, and the plan in `benchmarks/zoo/plan.py` says how long it
takes.

C²M³, MergeMany and REPAIR are explained on the page on [alignment](alignment.md), TSV-M, TSV-C and interference (STI)
on [experts](experts.md), MASS and what it is compared with on [adaptive models](adaptive.md), estimators of a merge's
quality (p-, gp-, mp- and gmp-IRT) on [evolution](evolution.md); `merganser methods` lists the others.
"""


def build(results: Path = RESULTS, out: Path = DOCS) -> tuple[str, list[Figure]]:
    """The page, and the figures it shows."""
    blocks: list[str] = []
    figures: list[Figure] = []
    contents: list[str] = []
    place = os.path.relpath(results, out)
    stored = {path.stem: path for path in sorted(results.glob("*.json"))}
    for section in (*SECTIONS, *others(stored)):
        if section.record not in stored:
            continue
        record = json.loads(stored[section.record].read_text(encoding="utf-8"))
        contents.append(f"- [{section.title}](#{markdown.anchor(section.title)})")
        blocks.append(f"## {section.title}")
        for part in section.make(record["results"]):
            blocks.append(markdown.write(part))
            if isinstance(part, Figure):
                figures.append(part)
        blocks.append(markdown.provenance(f"{place}/{section.record}.json", record))
    intro = INTRO.format(results=place).strip().split("\n\n")
    page = ["# Results", *map(markdown.paragraph, intro), "\n".join(contents), *blocks]
    return "\n\n".join(page) + "\n", figures


def stale(page: str, figures: Sequence[Figure], out: Path = DOCS) -> list[Path]:
    """Files that are missing, or that say something else than the stored results."""
    target = out / "results.md"
    found = [] if target.exists() and target.read_text(encoding="utf-8") == page else [target]
    for figure in figures:
        path = drawing_of(figure, out)
        if not path.exists() or not drawing.shows(path.read_text(encoding="utf-8"), figure):
            found.append(path)
    return found


def drawing_of(figure: Figure, out: Path) -> Path:
    return out / "images" / f"{figure.name}.svg"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="fail if a file is out of date; write nothing")
    parser.add_argument("--redraw", action="store_true", help="draw every figure, also those that are up to date")
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory of stored results")
    parser.add_argument("--out", type=Path, default=DOCS, help="directory for results.md and images/")
    options = parser.parse_args(arguments)
    page, figures = build(options.results, options.out)
    old = stale(page, figures, options.out)
    if options.check:
        if old:
            sys.exit(f"out of date: {', '.join(path.name for path in old)}; run make results")
        return
    (options.out / "images").mkdir(parents=True, exist_ok=True)
    (options.out / "results.md").write_text(page, encoding="utf-8")
    for figure in figures:
        path = drawing_of(figure, options.out)
        if options.redraw or path in old:
            path.write_text(drawing.render(figure), encoding="utf-8")


if __name__ == "__main__":
    main()
