"""The short part of `make crash`; the boundaries of a merge are in tests/engine/test_faults.py."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from crash.__main__ import FAULTS, fail_every_operation, kill_at_random, kill_one_of_two
from crash.faults import Counting
from crash.scenarios import SCENARIOS, Directory, LibraryChange, Scenario, ShortStudy, StudyRun, Sweep
from merganser.engine.disk import Disk

SHORT = [scenario for scenario in SCENARIOS if not isinstance(scenario, StudyRun)]  # tests/evolve kills studies


@pytest.mark.parametrize("scenario", SHORT, ids=lambda scenario: scenario.name)
def test_killed_at_random(tmp_path: Path, scenario: Scenario) -> None:
    totals = kill_at_random(scenario, tmp_path, 3, random.Random(0))
    assert (totals.tried, totals.wrong) == (3, [])


@pytest.mark.parametrize("fault", ["kill", "error"])
def test_a_directory_written_in_one_go(tmp_path: Path, fault: str) -> None:
    totals = fail_every_operation(Directory(), tmp_path, FAULTS[fault])
    assert totals.tried > 10
    assert totals.wrong == []


@pytest.mark.parametrize(
    ("scenario", "fault"),
    [(Sweep(), "full disk"), (LibraryChange(), "kill"), (LibraryChange(), "full disk"), (ShortStudy(), "full disk")],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_writes_of_sweeps_libraries_and_studies(tmp_path: Path, scenario: Scenario, fault: str) -> None:
    """Every second one; they repeat themselves, and `make crash` takes all."""
    totals = fail_every_operation(scenario, tmp_path, FAULTS[fault], step=2)
    assert totals.tried > 10
    assert totals.wrong == []


def test_one_of_two_is_killed(tmp_path: Path) -> None:
    assert kill_one_of_two(tmp_path, 3, random.Random(0)).wrong == []


def test_an_error_that_nobody_explains_is_found(tmp_path: Path) -> None:
    class Bare(Directory):
        def work(self, directory: Path, disk: Disk | None = None, again: bool = False) -> None:
            (disk or Counting()).before("write", directory)
            super().work(directory)

    assert "OSError" in fail_every_operation(Bare(), tmp_path, FAULTS["error"]).wrong[0]


def test_what_is_wrong_is_found(tmp_path: Path) -> None:
    """A harness that cannot fail shows nothing: a command that writes in place is caught."""

    class InPlace(Directory):
        def work(self, directory: Path, disk: Disk | None = None, again: bool = False) -> None:
            (directory / "out" / "old").unlink(missing_ok=True)
            (disk or Counting()).before("write", directory)
            for name in "01234":
                (directory / "out" / name).write_text(name)

    assert fail_every_operation(InPlace(), tmp_path, FAULTS["kill"]).wrong
