"""The plan of the zoo: everything that benchmarks need is in it, it fits a night, and its runner can be stopped."""

from __future__ import annotations

import fcntl
import itertools
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.zoo import __main__ as runner
from benchmarks.zoo.architectures import ARCHITECTURES
from benchmarks.zoo.plan import PLAN, Job
from benchmarks.zoo.text_tasks import ALL_TASKS


def seeds(*words: str) -> list[int]:
    """The seeds that the plan has for jobs with all of these words."""
    found = []
    for job in PLAN:
        line = (job.program, *job.options)
        if all(word in line for word in words):
            given = line[line.index("--seeds") + 1 :]
            found += [int(seed) for seed in itertools.takewhile(str.isdigit, given)]
    return sorted(found)


def test_it_fits_twelve_hours_of_two_cores() -> None:
    assert sum(job.minutes for job in PLAN) <= 2 * 12 * 60


def test_every_network_has_its_seeds() -> None:
    assert len({job.name for job in PLAN}) == len(PLAN)
    for arch in ARCHITECTURES:
        dataset = "fashion_mnist" if arch in ("mlp", "cnn") else "cifar10"
        assert len(seeds(arch, dataset)) >= 3, arch
    assert (
        seeds("resnet20-bn", "cifar10") == seeds("mlp", "fashion_mnist") == seeds("cnn", "fashion_mnist") == [*range(5)]
    )
    assert seeds("mlp", "mnist") == [*range(20)]
    assert all(seeds("text", task) == [0, 1, 2] for task in ALL_TASKS)
    assert seeds("image_experts") == [0, 1, 2]


def test_jobs_run_as_programs_and_failures_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = []

    def started(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, "--bad" in command)

    monkeypatch.setattr(runner.subprocess, "run", started)
    monkeypatch.setattr(runner, "PLAN", (Job("text", ("--good",), 1), Job("vision", ("--bad",), 1)))
    with pytest.raises(SystemExit, match="1 of 2 jobs failed: vision_bad"):
        runner.main(["--jobs", "1", "--cache", str(tmp_path), "--data", "d"])
    places = ["--cache", str(tmp_path), "--data", "d"]
    assert commands[0] == [sys.executable, "-m", "benchmarks.zoo.text", "--good", *places]
    assert "text_good: done" in capsys.readouterr().out


def test_a_job_that_runs_already_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner.subprocess, "run", lambda *_, **__: pytest.fail("started twice"))
    (tmp_path / "logs").mkdir()
    with (tmp_path / "logs" / "text_good.log").open("a") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        assert runner.run(Job("text", ("--good",), 1), tmp_path, tmp_path)
