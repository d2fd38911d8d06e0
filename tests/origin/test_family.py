"""Family trees through lock files, and the licences in them."""

from __future__ import annotations

from pathlib import Path

import pytest

import merganser as mg
from merganser.origin.licences import describe_terms, find_conflicts
from merganser.report.lineage import lineage_page


@pytest.fixture
def grandchild(models: Path) -> Path:
    mg.run("recipe.yml", "child")
    recipe = {
        "method": "linear",
        "models": ["child", {"recipe": {"method": "slerp", "parameters": {"t": 0.5}, "models": ["math", "code"]}}],
    }
    return mg.run(recipe, "grandchild")


def test_the_tree_goes_through_merges_of_merges(grandchild: Path) -> None:
    family = mg.origin.trace(grandchild)
    assert family.lines() == [
        "grandchild (merge by linear)",
        "├── child (merge by dare_linear)",
        "│   ├── base (model, mit)",
        "│   ├── math (model, apache-2.0)",
        "│   └── code (model, cc-by-sa-4.0)",
        "└── models[1] (merge by slerp)",
        "    ├── math (model, apache-2.0)",
        "    └── code (model, cc-by-sa-4.0)",
    ]
    assert family.licences == {"apache-2.0": ("math",), "cc-by-sa-4.0": ("code",), "mit": ("base",)}
    assert family.conflicts == []
    assert family.terms == ["cc-by-sa-4.0: derived works must be under the same licence"]


def test_what_cannot_be_followed_is_said(grandchild: Path, tmp_path_factory, monkeypatch) -> None:
    (Path("child") / "merganser.lock.json").write_text("{}")
    (note,) = mg.origin.trace(grandchild).notes
    assert note == "child: its merganser.lock.json has changed since it was merged"
    place = grandchild.resolve()
    monkeypatch.chdir(tmp_path_factory.mktemp("cwd"))
    family = mg.origin.trace(place)
    assert family.notes == ("child: was merged itself, but its merganser.lock.json is missing",)
    assert "child" in family.licences["unknown"]
    assert family.terms.count("unknown: ask the authors before you share the output") == 1


def test_a_page_draws_every_model_once_and_escapes_names(grandchild: Path, edit_lock) -> None:
    page = lineage_page(mg.origin.trace(grandchild)).render()
    assert page.count("<rect") == 6  # grandchild, child, the inner merge, base, math, code
    assert page.count('<path d="M') == 7
    edit_lock(
        grandchild, lambda data: data["models"][0].update(label="<script>alert(1)</script>\x1b[2J", licence="<b>")
    )
    family = mg.origin.trace(grandchild)
    page = lineage_page(family).render()
    assert "<script>alert" not in page
    assert "<b>" not in page
    assert not any("\x1b" in line for line in family.lines())


def test_a_lock_file_that_names_itself_ends(models: Path, edit_lock) -> None:
    out = mg.run("recipe.yml", "out")
    edit_lock(out, lambda data: data["models"][0].update(label="out", lock="0" * 64))
    assert "has changed since" in mg.origin.trace(out).notes[0]


@pytest.mark.parametrize(
    ("licences", "conflicts"),
    [
        (["mit", "apache-2.0", "bsd-3-clause"], 0),
        (["gpl-3.0", "mit"], 0),
        (["gpl-3.0", "agpl-3.0"], 0),
        (["cc-by-sa-3.0", "cc-by-sa-4.0"], 0),
        (["gpl-2.0", "gpl-3.0"], 1),
        (["cc-by-sa-4.0", "cc-by-nc-sa-4.0"], 1),
        (["gpl-3.0", "llama3.1"], 1),
        (["cc-by-sa-4.0", "cc-by-nc-4.0"], 1),
        (["cc-by-nc-nd-4.0"], 1),
        (["llama3.1", "gemma"], 0),
    ],
)
def test_conflicts(licences: list[str], conflicts: int) -> None:
    assert len(find_conflicts(licences)) == conflicts
    assert find_conflicts(reversed(licences)) == find_conflicts(licences)


def test_terms_are_named() -> None:
    terms = " ".join(describe_terms(["cc-by-nc-4.0", "gemma", "mit", "something"]))
    assert "no commercial use" in terms
    assert "gemma: its own terms" in terms
    assert "something: unknown licence" in terms
    assert "mit" not in terms
