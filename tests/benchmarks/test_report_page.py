"""The page of results follows the stored records: every number from them, nothing else, the same bytes every time."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks import report
from benchmarks.reporting import drawing, markdown, plain
from benchmarks.reporting.formats import amount, number, percent, rounding, signed, spread
from benchmarks.reporting.parts import Axis, Bars, Figure, Lines, Table, Text

RECORD = {"command": "python -m benchmarks.x", "date": "2026-01-01", "machine": "4 cores", "seeds": [0, 1, 2]}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A place with one stored record, and nothing built from it yet."""
    (tmp_path / "results").mkdir()
    way = {"accuracy": 0.5, "repaired_accuracy": 0.75, "cycle_error": 0.0}
    table = {"plain mean": way, "C²M³": way}
    settings = {"test_images": 10_000}
    store(tmp_path, "single_task_mlp", {"single": [0.9, 0.91, 0.9], "settings": settings, "2": table, "3": table})
    return tmp_path


def store(place: Path, name: str, results: object) -> None:
    (place / "results" / f"{name}.json").write_text(json.dumps({**RECORD, "results": results}))


def run(place: Path, *arguments: str) -> None:
    report.main([*arguments, "--results", str(place / "results"), "--out", str(place / "docs")])


def test_what_is_stored_is_shown_and_what_is_not_is_left_out(place: Path) -> None:
    built = report.build(place / "results", place / "docs")
    page = built.pages[Path("results/alignment.md")]
    assert set(built.pages) == {Path("results.md"), Path("results/alignment.md")}
    assert "## One task: MLPs on MNIST" in page
    assert "[One task: MLPs on MNIST](results/alignment.md#one-task-mlps-on-mnist)" in built.pages[Path("results.md")]
    assert "Speed of merging" not in page
    assert "75.0" in page
    assert "`python -m benchmarks.x`, 2026-01-01, 4 cores; seeds 0–2;" in page
    assert "[single_task_mlp.json](../../results/single_task_mlp.json)" in page
    assert [figure.name for figure in built.figures] == ["single_task_mlp"]


def test_a_record_without_a_section_of_its_own_gets_tables(place: Path) -> None:
    store(place, "brand_new", {"tasks": 8, "rows": {"a": {"score": 0.25}, "b": {"score": 0.5, "cost": 2}}})
    page = report.build(place / "results", place / "docs").pages[Path("results/more.md")]
    assert "## Brand new" in page
    assert "| a | 0.250 | – |" in page


def test_check_fails_until_built_and_again_when_a_number_changes(place: Path) -> None:
    with pytest.raises(SystemExit, match=r"alignment\.md, results\.md, single_task_mlp\.svg"):
        run(place, "--check")
    run(place)
    run(place, "--check")
    drawn = (place / "docs" / "images" / "single_task_mlp.svg").read_bytes()
    run(place, "--redraw")
    assert (place / "docs" / "images" / "single_task_mlp.svg").read_bytes() == drawn
    stored = (place / "results" / "single_task_mlp.json").read_text()
    (place / "results" / "single_task_mlp.json").write_text(stored.replace("0.75", "0.76"))
    with pytest.raises(SystemExit, match="run make results"):
        run(place, "--check")


def test_a_drawing_knows_its_data_and_keeps_its_words() -> None:
    lines = Lines(
        {"one": [(1, 2.0), (10, 3.0)]}, Axis("items", log=True), Axis("%", percent=True), "T", {"one": [1, 1]}
    )
    bars = Bars(["a", "b"], {"s": [1.0, None], "t": [2.0, 3.0]}, errors={"s": [0.1, 0.1]})
    figure = Figure("f", "alt", [lines, bars])
    svg = drawing.render(figure)
    assert drawing.shows(svg, figure)
    assert not drawing.shows(svg, Figure("f", "alt", [lines]))
    assert ">items<" in svg
    assert "<dc:date>" not in svg


def test_numbers_are_written_for_reading() -> None:
    assert [number(value) for value in (None, True, 0.0, 0.1234, 12.345, 1e-7, 7, float("nan"))] == [
        *("–", "yes", "0.000", "0.123", "12.3", "1.00e-07", "7", "–")
    ]
    assert percent(0.125) == "12.5"
    assert [percent(-0.0004), number(-0.0001), signed(-0.04), signed(0.04), signed(1.0)] == [
        *("0.0", "-1.00e-04", "0.0", "0.0", "+1.0")
    ]
    assert [amount(947123.0), amount(12.34)] == ["947,000", "12.3"]
    assert [rounding(0.0), rounding(6.4e-8), rounding(0.054)] == ["0", "6.4e-08", "0.054"]
    assert spread([0.5, 0.7]) == "60.0 ± 10.0"


def test_tables_and_paragraphs() -> None:
    assert markdown.write(Table(["a", "b"], [["x|y", "1"]], "C")) == "*C*\n\n| a | b |\n|---|---|\n| x\\|y | 1 |"
    assert all(len(line) <= markdown.WIDTH for line in markdown.write(Text("word " * 100)).splitlines())
    assert list(plain.tables([{"a": 1}, {"a": 2}])) == [Table(["", "a"], [["1", "1"], ["2", "2"]], "")]
    assert "seeds 0, 5" in markdown.provenance("x.json", {**RECORD, "seeds": [0, 5]})


def test_a_page_without_records_goes(place: Path) -> None:
    store(place, "brand_new", {"tasks": 8})
    run(place)
    (place / "results" / "brand_new.json").unlink()
    with pytest.raises(SystemExit, match=r"more\.md"):
        run(place, "--check")
    run(place)
    assert not (place / "docs" / "results" / "more.md").exists()


def test_goals_that_are_not_met_are_listed_with_those_of_networks_that_were_not_trained(place: Path) -> None:
    row = {"accuracy": 0.5, "repaired_accuracy": 0.75, "cycle_error": 0.0}
    results = {"single": [0.85], "settings": {"test_images": 100}, "2": {"plain mean": row, "C²M³": row}}
    store(place, "single_task_resnet20-bn", results)
    page = " ".join(report.build(place / "results", place / "docs").pages[Path("results.md")].split())
    listed = page.split("## Goals that are not met ")[1].split(" ## ")[0].split("- ")
    link = "[One task: ResNet20 on CIFAR-10](results/alignment.md#one-task-resnet20-on-cifar-10)"
    assert f"{link}. Goal: single networks at 88 % or more: not met (85.0 %). " in listed
    assert any(said.startswith("One task: VGG11 on CIFAR-10: not measured") for said in listed)
    assert not any(said.startswith("One task: ResNet20 on") for said in listed)


def test_questions_are_answered_from_the_records(place: Path) -> None:
    page = " ".join(report.build(place / "results", place / "docs").pages[Path("results.md")].split())
    assert "## Does alignment work?" in page
    assert "The plain mean of 3 MLPs trained from different seeds classifies 50.0 % of the digits" in page
    assert "How fast" not in page


def test_ten_questions_with_commands_that_exist() -> None:
    from benchmarks.reporting.questions import QUESTIONS
    from merganser.cli import COMMANDS

    assert len(QUESTIONS) == 10
    for question in QUESTIONS:
        program, command = question.command.split()[:2]
        assert program == "merganser"
        assert command in COMMANDS


def test_every_section_begins_with_what_it_means() -> None:
    from benchmarks.reporting.leads import LEADS
    from benchmarks.reporting.sections import SECTIONS

    assert set(LEADS) == {section.record for section in SECTIONS}


def test_no_page_shows_a_zero_with_a_sign_or_an_exponent() -> None:
    for path, text in report.build().pages.items():
        assert not re.findall(r"(?<![\w.])[-+−]0(?:\.0+)?(?![\d.])|\b0\.0+e|\de\+\d", text), path
