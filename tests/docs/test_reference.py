"""The site: the generated reference covers every method, and no link of a page leaves `docs/`."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import yaml

from merganser.methods.registry import registry

DOCS = Path(__file__).parents[2] / "docs"
WHEN = yaml.safe_load((DOCS / "tools" / "when_to_use.yml").read_text(encoding="utf-8"))


def test_the_reference_says_when_to_use_each_method() -> None:
    assert list(WHEN) == sorted(registry())
    assert all(sentence.endswith(".") for sentence in WHEN.values())


def test_links_stay_on_the_site() -> None:
    pytest.importorskip("latex2mathml")
    hooks = runpy.run_path(str(DOCS / "tools" / "hooks.py"))
    for page in DOCS.rglob("*.md"):
        shown = hooks["on_page_markdown"](page.read_text(encoding="utf-8"))
        for link in re.findall(r"\]\(((?:\.\./)+[^)\s#]+)", shown):
            assert (page.parent / link).resolve().is_relative_to(DOCS), f"{page.name}: {link}"


def test_examples_become_code_and_not_a_note(tmp_path: Path) -> None:
    griffe = pytest.importorskip("griffe")
    (tmp_path / "shown.py").write_text('def f():\n    """Do.\n\n    Example:\n        >>> f()\n        1\n    """\n')
    extensions = griffe.load_extensions(str(DOCS / "tools" / "examples.py"))
    found = griffe.load("shown", search_paths=[tmp_path], extensions=extensions)["f"]
    assert [section.kind.value for section in found.docstring.parse("google")] == ["text", "examples"]
