"""Jobs are our own commands in processes of their own, and everything about them is on disk."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time

import pytest

import merganser as mg
from merganser.errors import InputError
from merganser.studio.commands import KINDS, build_command
from merganser.studio.jobs import Command, Jobs, words
from merganser.studio.roots import Roots

RECIPE = "method: ties\nbase: base\nmodels: [math, code]\n"


def wait(jobs, name, *states):
    for _ in range(1200):
        job = jobs.describe(name)
        if job["status"] in (states or ("done", "failed", "cancelled", "interrupted")):
            return job
        time.sleep(0.1)
    raise AssertionError(jobs.output(name))


@pytest.fixture
def jobs(tmp_path):
    return Jobs(tmp_path / "jobs")


def start_sleeper(jobs, folder):
    """Start a job that waits for a recipe that never comes: a command that can be stopped at leisure."""
    os.mkfifo(folder / "never.yml")
    arguments = words("merge", str(folder / "never.yml"), str(folder / "o"), json=True)
    return jobs.start(Command("merge", "Wait", arguments, str(folder), resumable=True))["id"]


@contextlib.contextmanager
def sleeper(jobs, folder):
    """A job that is waiting for its recipe: it has opened the pipe, and nobody writes into it."""
    name = start_sleeper(jobs, folder)
    for _ in range(1200):
        with contextlib.suppress(OSError):  # nobody reads yet
            writer = os.open(folder / "never.yml", os.O_WRONLY | os.O_NONBLOCK)
            break
        time.sleep(0.1)
    else:
        raise AssertionError(jobs.output(name))
    try:
        yield name
    finally:
        os.close(writer)


def test_a_merge_is_what_the_command_line_merges(client, folder):
    values = {"text": RECIPE, "out": "merged"}
    job = client.post("/api/jobs", json={"kind": "merge", "values": values}).json()
    for _ in range(1200):
        found = client.get(f"/api/jobs/{job['id']}").json()
        if found["status"] not in ("starting", "running"):
            break
        time.sleep(0.1)
    assert found["status"] == "done", found
    assert {event["event"] for event in found["events"]} >= {"plan", "progress", "done"}
    models = [str(folder / "math"), str(folder / "code")]
    mg.run({"method": "ties", "base": str(folder / "base"), "models": models}, folder / "again")
    one, two = (mg.open(folder / name).state_dict() for name in ("merged", "again"))
    assert all(one[name].equal(two[name]) for name in two)
    assert client.delete(f"/api/jobs/{job['id']}").status_code == 200
    assert (folder / "merged").is_dir()
    assert client.get("/api/jobs").json() == []


def test_a_merge_replaces_a_directory_only_if_asked_to(client):
    values = {"text": RECIPE, "out": "code"}
    refused = client.post("/api/jobs", json={"kind": "merge", "values": values})
    assert refused.status_code == 422
    assert "code exists already" in refused.json()["error"]
    assert client.get("/api/jobs").json() == []


def test_the_name_of_an_expert_is_no_option(client):
    values = {"base": "base", "experts": {"--html": "math", "code": "code"}}
    refused = client.post("/api/jobs", json={"kind": "interference", "values": values})
    assert refused.status_code == 422
    assert "must not begin with a dash" in refused.json()["error"]


def test_what_is_wrong_is_said_before_anything_starts(client):
    for values, message in (
        ({"text": "method: tiez\nmodels: [math]\n", "out": "m"}, "did you mean 'ties'"),
        ({"text": RECIPE, "out": ""}, "name the place"),
        ({"text": RECIPE, "out": ".merganser/x"}, "choose another name"),
        ({"text": RECIPE}, "'out' is missing"),
    ):
        found = client.post("/api/jobs", json={"kind": "merge", "values": values})
        assert found.status_code == 422
        assert message in found.json()["error"]
    assert "unknown kind" in client.post("/api/jobs", json={"kind": "rm", "values": {}}).json()["error"]
    assert client.get("/api/jobs").json() == []


def test_cancel_and_resume(jobs, folder):
    with sleeper(jobs, folder) as name:
        with pytest.raises(InputError, match="cancel it first"):
            jobs.remove(name)
        jobs.cancel(name)
        job = wait(jobs, name)
    assert (job["status"], job["code"]) == ("cancelled", 130)
    (folder / "never.yml").unlink()
    (folder / "never.yml").write_text(RECIPE)
    again = jobs.resume(name)
    assert again["attempts"] == 2
    assert wait(jobs, name)["status"] == "done"
    assert (folder / "o").is_dir()
    with pytest.raises(InputError, match="only one that was stopped"):
        jobs.resume(name)


@pytest.mark.parametrize("seconds", [0, 0.05, 0.1, 0.2, 0.4])
def test_a_job_is_cancelled_at_whatever_moment_of_its_start(jobs, folder, seconds):
    name = start_sleeper(jobs, folder)
    time.sleep(seconds)
    jobs.cancel(name)
    assert wait(jobs, name)["status"] == "cancelled"


def test_cancelling_a_job_that_has_ended_changes_nothing(jobs, folder):
    job = jobs.start(Command("check", "Check", words("inspect", str(folder / "nothing"), json=True), str(folder)))
    before = wait(jobs, job["id"])
    assert jobs.cancel(job["id"]) == before
    assert before["status"] == "failed"


def test_a_job_killed_with_its_runner_counts_as_interrupted(jobs, folder):
    with sleeper(jobs, folder) as name:
        os.killpg(int((jobs.directory / name / "process").read_text()), signal.SIGKILL)
        assert wait(jobs, name)["status"] == "interrupted"
    assert Jobs(jobs.directory).describe(name)["status"] == "interrupted"


def test_a_failed_job_says_why(jobs, folder):
    job = jobs.start(Command("check", "Check", words("inspect", str(folder / "nothing"), json=True), str(folder)))
    found = wait(jobs, job["id"])
    assert found["status"] == "failed"
    assert "no such" in found["error"]
    assert "no such" in jobs.output(job["id"])["log"]


def test_every_kind_makes_a_command_that_exists(folder):
    from typer.main import get_command

    from merganser.cli import build
    from merganser.cli.commands import find_commands

    values = {
        "text": RECIPE,
        "out": "new",
        "path": "base",
        "base": "base",
        "experts": ["math", "code"],
        "budget": 10**6,
        "parents": ["math"],
        "trial": "0:1",
    }
    tree = get_command(build())
    for kind in KINDS:
        made = build_command(Roots([folder]), kind, values)
        command = find_commands(tree, made.arguments)[-1]
        options = {option for parameter in command.params for option in parameter.opts}
        assert {word for word in made.arguments if word.startswith("--")} <= options, kind


def test_progress_is_the_last_event_that_has_any(jobs, folder):
    directory = jobs.directory / "j1"
    directory.mkdir()
    (directory / "job.json").write_text(
        json.dumps({"kind": "merge", "title": "t", "created": time.time(), "attempts": 1})
    )
    lines = [
        {"event": "plan"},
        {"event": "progress", "done": 1, "total": 4},
        {"event": "progress", "done": 3, "total": 4},
    ]
    (directory / "events.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"event": "progr')
    job = jobs.describe("j1")
    assert job["status"] == "starting"
    assert job["progress"]["done"] == 3
    for name in ("../j1", "j1/../j1", "", "nothing"):
        with pytest.raises(InputError, match="no such job"):
            jobs.describe(name)
