"""Builds docs/results.md, the pages in docs/results and their figures from stored results alone.

    python -m benchmarks.report [--check] [--results DIR] [--out DIR]

Every number comes from `benchmarks/results/*.json`, which the benchmarks write with `--json`; what has not been
measured is left out. `--check` writes nothing and fails if something is out of date.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.records import RESULTS
from benchmarks.reporting import drawing, goals, markdown
from benchmarks.reporting.leads import LEADS
from benchmarks.reporting.parts import Figure, Part
from benchmarks.reporting.questions import QUESTIONS
from benchmarks.reporting.sections import PAGES, Section, others

DOCS = Path(__file__).parents[1] / "docs"
INTRO = """
Ten questions, each answered with one sentence, one figure and one command. The pages listed at the end have the full
tables. Every section names the command and the machine that produced its numbers. The models are small enough to train
on two cores (`benchmarks/zoo/`), so expect other accuracies for larger models.
"""
READING = """
`make results` builds these pages from the files in [benchmarks/results]({results}), and a test fails when they
disagree. *Normalised* accuracy is the accuracy of a merge divided by that of the expert of the task, averaged over
tasks. *One standard error* is that of an accuracy over the test set, √(a(1 − a)/n). Goals are marked *met* or *not
met*. For networks trained apart, a *guard* checks that training has moved their weights: the median cosine with the
initial weights must be at most 0.6. `make zoo` trains all networks; the plan in `benchmarks/zoo/plan.py` shows how long
it takes. Networks that have not been trained have no section.

[Alignment](alignment.md) explains C²M³, MergeMany and REPAIR. [Expert libraries](experts.md) explains TSV-M, TSV-C and
interference (STI). [Adaptive models](adaptive.md) explains MASS and its competitors. [Evolution](evolution.md) explains
the estimators (p-, gp-, mp- and gmp-IRT). `merganser methods` lists the other methods.
"""
Records = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Built:
    """Pages by their path under the documentation, and the figures they show."""

    pages: Mapping[Path, str]
    figures: Sequence[Figure]


def build(results: Path = RESULTS, out: Path = DOCS) -> Built:
    """Make all pages from the records in `results`."""
    records = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(results.glob("*.json"))}
    pages: dict[Path, str] = {}
    figures: dict[str, Figure] = {}
    contents: list[str] = []
    missed: list[str] = []
    for page in (*PAGES, others(records)):
        shown = [section for section in page.sections if section.record in records]
        if not shown:
            continue
        path = Path("results") / f"{page.name}.md"
        made = {each: list(each.make(records[each.record]["results"])) for each in shown}
        links = {each: f"[{each.title}]({path.as_posix()}#{markdown.anchor(each.title)})" for each in shown}
        contents += [f"- **[{page.title}]({path.as_posix()})**", *(f"  - {link}" for link in links.values())]
        missed += [f"- {links[each]}. {said}" for each, parts in made.items() for said in goals.missed(parts)]
        place = os.path.relpath(results, out / path.parent)
        pages[path] = "\n\n".join([f"# {page.title}", *_sections(made, records, place, figures)]) + "\n"
    questions = list(_questions(records, figures))
    reading = READING.format(results=os.path.relpath(results, out)).strip().split("\n\n")
    missed += [f"- {said}" for said in goals.untrained(records)]
    front = ["# Results", markdown.paragraph(INTRO), *questions]
    front += (
        ["## Goals that are not met", "\n".join(markdown.paragraph(said).replace("\n", "\n  ") for said in missed)]
        if missed
        else []
    )
    front += ["## All measurements", "\n".join(contents)]
    pages[Path("results.md")] = "\n\n".join([*front, *map(markdown.paragraph, reading)]) + "\n"
    return Built(pages, list(figures.values()))


def _sections(
    made: Mapping[Section, Sequence[Part]], records: Records, place: str, figures: dict[str, Figure]
) -> Iterator[str]:
    """The blocks of a page; figures are added to those known."""
    for section, parts in made.items():
        record = records[section.record]
        yield f"## {section.title}"
        if section.record in LEADS:
            yield markdown.paragraph(f"**In short:** {LEADS[section.record](record['results'])}")
        for part in parts:
            yield markdown.write(part, "../images")
            if isinstance(part, Figure):
                figures[part.name] = part
        yield markdown.provenance(f"{place}/{section.record}.json", record)


def _questions(records: Records, figures: dict[str, Figure]) -> Iterator[str]:
    """The questions that the records answer, with a link to the section that has all of it."""
    places = {section.record: (page, section) for page in PAGES for section in page.sections}
    for question in QUESTIONS:
        if question.record not in records:
            continue
        used = [records[name]["results"] for name in (question.record, question.beside) if name in records]
        if (answer := question.answer(*used)) is None:
            continue
        sentence, figure = answer
        shown = figures[figure] if isinstance(figure, str) else figures.setdefault(figure.name, figure)
        page, section = places[question.record]
        yield f"## {question.title}"
        link = f"[The full tables](results/{page.name}.md#{markdown.anchor(section.title)})."
        yield markdown.paragraph(f"{sentence} {link}")
        yield markdown.write(shown)
        yield f"```sh\n{question.command}\n```"


def stale(built: Built, out: Path = DOCS) -> list[Path]:
    """Files that are missing, that say something else than the stored results, or that nothing stored is behind."""
    found = []
    for path, text in built.pages.items():
        target = out / path
        if not target.exists() or target.read_text(encoding="utf-8") != text:
            found.append(target)
    for figure in built.figures:
        path = drawing_of(figure, out)
        if not path.exists() or not drawing.shows(path.read_text(encoding="utf-8"), figure):
            found.append(path)
    return found + [path for path in (out / "results").glob("*.md") if path.relative_to(out) not in built.pages]


def drawing_of(figure: Figure, out: Path) -> Path:
    return out / "images" / f"{figure.name}.svg"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="fail if a file is out of date; write nothing")
    parser.add_argument("--redraw", action="store_true", help="draw every figure, also those that are up to date")
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory of stored results")
    parser.add_argument("--out", type=Path, default=DOCS, help="directory for results.md, results/ and images/")
    options = parser.parse_args(arguments)
    built = build(options.results, options.out)
    old = stale(built, options.out)
    if options.check:
        if old:
            sys.exit(f"out of date: {', '.join(path.name for path in old)}; run make results")
        return
    for folder in ("images", "results"):
        (options.out / folder).mkdir(parents=True, exist_ok=True)
    for path in old:
        if path.suffix == ".md" and path.relative_to(options.out) not in built.pages:
            path.unlink()
    for path, text in built.pages.items():
        (options.out / path).write_text(text, encoding="utf-8")
    for figure in built.figures:
        path = drawing_of(figure, options.out)
        if options.redraw or path in old:
            path.write_text(drawing.render(figure), encoding="utf-8")


if __name__ == "__main__":
    main()
