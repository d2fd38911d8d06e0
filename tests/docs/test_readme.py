from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.readme import PARTS, ROOT, rewritten
from benchmarks.report import build, stale


@pytest.mark.parametrize("file", list(PARTS))
def test_generated_parts_are_up_to_date(file: str) -> None:
    assert rewritten(file) == (ROOT / file).read_text(), "run make readme"


def test_results_and_figures_say_what_was_stored() -> None:
    assert stale(*build()) == [], "run make results"


def test_the_two_commands_are_named() -> None:
    text = (ROOT / "README.md").read_text()
    assert "make demo" in text
    assert "make test" in text


def test_links_lead_somewhere() -> None:
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        for part in page.read_text().split("](")[1:]:
            target = part.split(")")[0].split("#")[0]
            if target and "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_no_file_speaks_of_one_machine() -> None:
    for page in (ROOT / "README.md", *sorted(Path(ROOT / "docs").glob("*.md"))):
        assert "/home/" not in page.read_text()
