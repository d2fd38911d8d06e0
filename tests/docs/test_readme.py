from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.readme import PARTS, ROOT, rewritten
from benchmarks.report import build, stale


@pytest.mark.parametrize("file", list(PARTS))
def test_generated_parts_are_up_to_date(file: str) -> None:
    assert rewritten(file) == (ROOT / file).read_text(), "run make results"


def test_results_and_figures_say_what_was_stored() -> None:
    assert stale(build()) == [], "run make results"


PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "examples/README.md")]
PAGES += sorted((ROOT / "docs").rglob("*.md"))


def anchors(page: Path) -> set[str]:
    """The headings of a page as links name them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in link:
            continue
        target, _, anchor = link.partition("#")
        found = page.parent / target if target else page
        assert found.exists(), link
        assert not anchor or anchor in anchors(found), link


def test_no_file_speaks_of_one_machine() -> None:
    """Nor of a package registry's host. Everything a reader of the sources sees, this file aside."""
    words = re.compile(r"/home/\w|/work/|/root/|\.\./shared|pypi\.org|pythonhosted")
    folders = ("src", "tests", "benchmarks", "examples", "docs")
    texts = {path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()} | set(PAGES)
    texts |= {ROOT / "Makefile", ROOT / "pyproject.toml", ROOT / "constraints.txt", ROOT / ".ci/run"}
    for path in texts - {Path(__file__)}:
        if path.suffix in {".py", ".md", ".yml", ".json", ".toml", ".txt", ".html", ".js", ""}:
            assert not words.search(path.read_text(encoding="utf-8")), path
