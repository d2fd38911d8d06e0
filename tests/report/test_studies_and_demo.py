"""Pages of studies and of the demo's output."""

import json
import sqlite3

import pytest

from merganser.errors import InputError
from merganser.evolve import Design, Objective, Search, SearchParameter, Study, StudyTask
from merganser.report import demonstration
from merganser.report.directories import report


class Answers:
    """Candidates answer more questions the nearer their weights are to 1; some day the lights go out."""

    def __init__(self, left=10**6):
        self.left = left

    def __call__(self, candidate, items):
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        near = 0.5 if isinstance(candidate, str) else 1 - min(1, abs(sum(candidate.values()) / len(candidate) - 1))
        return {task: [float((7 * i) % 10 < 10 * near) for i in asked] for task, asked in items.items()}


def build_design(search):
    return Design(
        space={"weight": SearchParameter(0, 2, per="model")},
        tasks={"quiz": StudyTask(40)},
        objectives=(Objective.of("quiz"),),
        models={"math": "./math", "code": "./code"},
        search=search,
    )


@pytest.fixture
def study(tmp_path):
    """A function that runs a study of ten trials in a directory, or a part of it."""
    pytest.importorskip("pymoo")

    def run(evaluations=10**6):
        design = build_design(Search(population=5, generations=2))
        opened = Study.open(tmp_path / "study.sqlite")
        try:
            opened.run(design, Answers(evaluations))
        except KeyboardInterrupt:
            pass
        finally:
            opened.close()
        return tmp_path

    return run


def test_a_study_that_ended(study):
    page, [found] = report(study())
    assert found == {**found, "kind": "study", "trials": 10, "ended": True}
    assert "Winners on unseen items" in page.render()
    assert page.title == "Study: study.sqlite"


def test_a_study_that_was_interrupted_says_how_far_it_is(study):
    page, [found] = report(study(4))
    assert not found["ended"]
    assert "Not ended: 4 of 10 trials" in page.render()


def test_a_search_that_ends_early_by_itself_has_ended(tmp_path):
    """CMA-ES stops when everything it tries is equally good."""
    pytest.importorskip("cma")
    design = build_design(Search("cmaes", population=6, generations=200))
    opened = Study.open(tmp_path / "study.sqlite")
    opened.run(design, lambda candidate, items: {"quiz": [1.0] * len(items["quiz"])})
    assert len(opened.trials()) < design.search.trials
    opened.close()
    page, [found] = report(tmp_path)
    assert found["ended"]
    assert "Not ended" not in page.render()


def test_a_file_that_only_looks_like_a_study(tmp_path):
    (tmp_path / "other.sqlite").write_text("not a database at all, but long enough to be looked into " * 4)
    with pytest.raises(InputError, match="not a study"):
        report(tmp_path)


def test_strangers_do_not_hide_a_study(study):
    """A database of something else, an empty file, a study that was opened and never run."""
    folder = study()
    sqlite3.connect(folder / "notes.db").execute("CREATE TABLE notes (text)").connection.commit()
    (folder / "empty.sqlite").touch()
    Study.open(folder / "fresh.sqlite").close()
    page, found = report(folder)
    kinds = {each["path"].rpartition("/")[2]: each.get("error", "") for each in found}
    assert kinds.keys() == {"empty.sqlite", "fresh.sqlite", "study.sqlite"}
    assert "an empty file, not a study" in kinds["empty.sqlite"]
    assert "an empty study" in kinds["fresh.sqlite"]
    assert not kinds["study.sqlite"]
    assert "Winners on unseen items" in page.render()
    assert "Could not be read" in page.render()


def test_a_study_by_any_name(study):
    folder = study()
    (folder / "study.sqlite").rename(folder / "mine.db")
    _, [found] = report(folder / "mine.db")
    assert found["ended"]


@pytest.mark.parametrize(("place", "message"), [(".", "a directory"), ("none/page.html", "no directory")])
def test_pages_that_cannot_be_written_are_refused_first(study, monkeypatch, place, message):
    from typer.testing import CliRunner

    from merganser.cli import build

    folder = study()
    monkeypatch.setattr("merganser.report.directories.report", None)  # never asked
    words = ["report", str(folder / "study.sqlite"), "--html", str(folder / place)]
    result = CliRunner().invoke(build(), words)
    assert isinstance(result.exception, InputError)
    assert message in str(result.exception)


def test_a_study_has_its_page_beside_it(study):
    from typer.testing import CliRunner

    from merganser.cli import build

    file = study() / "study.sqlite"
    result = CliRunner().invoke(build(), ["report", str(file), "--json"])
    assert json.loads(result.stdout)["path"] == str(file.with_suffix(".html"))
    assert "Winners on unseen items" in file.with_suffix(".html").read_text()


def test_the_demo_page_comes_from_what_it_stored(tmp_path):
    merging = [["base", 0.5, 0.25, 0.375, 0.4], ["tsv", 0.75, 0.5, 0.625, 0.9]]
    demonstration.write(tmp_path, ["up", "down"], 400, merging, [["plain average", 0.5]])
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "tsv.yml").write_text("method: tsv")
    page, [found] = report(tmp_path)
    text = page.render()
    assert found["merging"] == merging
    assert found["kind"] == "demo"
    for part in ("plain average", "method: tsv", ">down</th>", "tsv: 0.625 (0.6017 to 0.6483)"):
        assert part in text


def test_results_of_something_else_are_not_the_demo(tmp_path):
    for content in ("[]", "not json", '{"tasks": 1}'):
        (tmp_path / "results.json").write_text(content)
        assert not demonstration.is_demo(tmp_path)
    with pytest.raises(InputError, match="nothing to report on"):
        report(tmp_path)
