"""Forked workers: the same bytes as threads, and nothing lost when a worker, the parent or the disk fails."""

from __future__ import annotations

import errno
import io
import os
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from merganser.engine import processes
from merganser.engine.compute import Arithmetic, Computations
from merganser.engine.disk import Disk
from merganser.engine.execute import Progress, batches, execute, find_pending
from merganser.engine.merge import Merge
from merganser.engine.plan import Plan
from merganser.engine.processes import execute_in_processes, is_worthwhile
from merganser.engine.sinks import DictSink, Sink
from merganser.engine.writer import CheckpointWriter, Destination
from merganser.errors import InputError, MerganserError
from merganser.methods.task_vectors import Ties
from support.plans import make_plan

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes are forked on Linux only")


def models(count: int = 3, tensors: int = 12) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        {f"layers.{i}.w": torch.randn(30 + i, 200, generator=generator) for i in range(tensors)} for _ in range(count)
    ]


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork for little work too, with a batch for every tensor."""
    monkeypatch.setattr(processes, "_WORTH", 0)
    monkeypatch.setattr("merganser.engine.execute.SPAN", 1)


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise AssertionError("threads were used")

    monkeypatch.setattr(processes, "run_in_threads", refuse)


def in_processes(
    out: Path, plan: Plan, sources: list, resume: bool = False, disk: Disk | None = None, **options: object
):
    writer = CheckpointWriter(Destination(out, resume, disk=disk or Disk()), plan, "print")
    try:
        execute_in_processes(Merge(plan, sources), writer, **{"workers": 2, **options})
        return (writer.publish(lambda directory: None) / "model.safetensors").read_bytes()
    except BaseException:
        writer.abandon()
        raise


def in_threads(out: Path, plan: Plan, sources: list) -> bytes:
    writer = CheckpointWriter(Destination(out), plan, "print")
    execute(Merge(plan, sources), writer)
    return (writer.publish(lambda directory: None) / "model.safetensors").read_bytes()


@pytest.mark.usefixtures("no_threads")
@pytest.mark.parametrize("method", ["linear", "ties", "dare_ties", "della", "model_stock"])
@pytest.mark.parametrize("options", [{"workers": 2}, {"workers": 5}, {"memory": 1}])
def test_processes_change_no_bit(tmp_path: Path, method: str, options: dict[str, int]) -> None:
    plan, sources = make_plan(models(), method)
    seen: list[Progress] = []
    found = in_processes(tmp_path / "out", plan, sources, on_progress=seen.append, **options)
    assert found == in_threads(tmp_path / "reference", plan, sources)
    assert {progress.name for progress in seen} == {output.name for output in plan.outputs}
    assert seen[-1].done == seen[-1].total == plan.bytes_out


def test_when_processes_are_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def verdict(given: list[dict[str, Tensor]], method: str, workers: int = 2, device: str = "cpu") -> bool:
        plan, sources = make_plan(given, method)
        computations = Computations(Merge(plan, sources), Arithmetic(device))
        return is_worthwhile(list(batches(find_pending(computations, DictSink(plan)))), workers)

    assert verdict(models(), "ties")
    assert not verdict(models(), "ties", workers=1)
    assert not verdict(models(), "ties", device="cuda")
    assert not verdict(models(), "tsv")  # decompositions keep to threads
    assert not verdict([m | {"embedding": torch.zeros(4000, 200)} for m in models()], "ties")  # the rest would wait
    monkeypatch.setattr(processes, "_WORTH", 1 << 25)
    assert not verdict(models(), "ties")


def test_many_small_outputs_are_work_for_more_than_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    plan, sources = make_plan([{f"w{i}": torch.zeros(8) for i in range(4000)} for _ in range(2)], "linear")
    cut = list(batches(find_pending(Computations(Merge(plan, sources)), DictSink(plan))))
    assert 4 <= len(cut) < 100
    assert is_worthwhile(cut, workers=2)


@pytest.mark.usefixtures("no_threads")
def test_what_a_worker_finds_is_said_as_ever(tmp_path: Path) -> None:
    given = models()
    given[1]["layers.3.w"][2, 5] = float("nan")
    plan, sources = make_plan(given, "linear")
    with pytest.raises(InputError, match=r"m1: tensor 'layers.3.w' contains NaN"):
        in_processes(tmp_path / "out", plan, sources)
    assert not (tmp_path / "out").exists()


class Odd(Exception):
    """Loses an argument on its way through a pipe, so that it cannot be rebuilt."""

    def __init__(self, what: str, where: str) -> None:
        super().__init__(f"{what} in {where}")


@pytest.mark.usefixtures("no_threads")
@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [(ValueError("seven"), ValueError, "^seven$"), (Odd("a", "b"), RuntimeError, "^Odd: a in b$")],
)
def test_an_unexpected_error_keeps_its_kind_where_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[Exception], message: str
) -> None:
    def fail(*args: object) -> None:
        raise error

    monkeypatch.setattr(processes, "run_batch", fail)
    plan, sources = make_plan(models(), "linear")
    with pytest.raises(kind, match=message) as caught:
        in_processes(tmp_path / "out", plan, sources)
    assert "in fail" in str(caught.value.__cause__)


def test_streams_locked_by_another_thread_do_not_stop_a_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Locked(io.StringIO):
        def write(self, text: str) -> int:
            raise AssertionError("the parent's stream was used")

    run_batch = processes.run_batch

    def talk(batch: list, sink: Sink) -> None:
        print("hello")
        warnings.warn("hello", stacklevel=1)
        run_batch(batch, sink)

    monkeypatch.setattr(processes, "run_batch", talk)
    monkeypatch.setattr(sys, "stdout", Locked())
    monkeypatch.setattr(sys, "stderr", Locked())
    plan, sources = make_plan(models(), "linear")
    in_processes(tmp_path / "out", plan, sources)


@pytest.mark.usefixtures("no_threads")
@pytest.mark.parametrize("granted", [0, 1])
def test_fewer_processes_than_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, granted: int) -> None:
    forks = []
    fork = os.fork

    def limited() -> int:
        if len(forks) == granted:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        forks.append(1)
        return fork()

    monkeypatch.setattr(os, "fork", limited)
    plan, sources = make_plan(models(), "linear")
    if granted:
        assert in_processes(tmp_path / "out", plan, sources) == in_threads(tmp_path / "reference", plan, sources)
    else:
        with pytest.raises(MerganserError, match="no worker could be started: .*workers=1"):
            in_processes(tmp_path / "out", plan, sources)


def test_nested_merges_and_little_work_keep_to_threads_and_prepare_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = []
    monkeypatch.setattr(Ties, "prepare", lambda self, tensors: prepared.append(1))
    monkeypatch.setattr(Ties, "reduce", lambda self, blocks: Ties.sparsifier.fget(self).survey(blocks))  # type: ignore[attr-defined]
    monkeypatch.setattr(processes, "_WORTH", 1 << 40)
    plan, sources = make_plan(models(), "ties", {"scope": "global"})
    in_processes(tmp_path / "little", plan, sources)
    assert prepared == [1]
    monkeypatch.setattr(processes, "_WORTH", 0)
    monkeypatch.setattr(processes, "_run", None)
    nested = replace(plan, models=(replace(plan.models[0], plan=plan), *plan.models[1:]))
    in_processes(tmp_path / "nested", nested, sources)


@pytest.mark.usefixtures("no_threads")
def test_a_full_disk_in_a_worker_then_resume(tmp_path: Path) -> None:
    class Full(Disk):
        def before(self, operation: str, path: Path) -> None:
            self.count = getattr(self, "count", 0) + (operation == "write")
            if self.count == 5:
                raise OSError(errno.ENOSPC, "full")

    plan, sources = make_plan(models(), "ties")
    with pytest.raises(MerganserError, match="no space left on the disk"):
        in_processes(tmp_path / "out", plan, sources, disk=Full())
    found = in_processes(tmp_path / "out", plan, sources, resume=True)
    assert found == in_threads(tmp_path / "reference", plan, sources)


def test_a_killed_worker_is_named_and_the_rest_is_kept(tmp_path: Path) -> None:
    def children() -> list[int]:
        return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]

    before = children()

    killed = []

    def kill(progress: Progress) -> None:
        if not killed:
            killed.append(progress)
            os.kill(next(pid for pid in children() if pid not in before), signal.SIGKILL)

    plan, sources = make_plan(models(tensors=40), "ties")
    with pytest.raises(MerganserError, match=r"a worker was ended by signal 9 \(out of memory\?\).*resume=True"):
        in_processes(tmp_path / "out", plan, sources, on_progress=kill)
    assert set(children()) <= set(before)
    redone: list[Progress] = []
    found = in_processes(tmp_path / "out", plan, sources, resume=True, on_progress=redone.append)
    assert found == in_threads(tmp_path / "reference", plan, sources)
    assert 0 < len(redone) < len(plan.outputs)


PARENT = """
import os, signal, sys, time
from pathlib import Path
import merganser.engine.execute as execute
import merganser.engine.processes as processes
from merganser.recipes.running import run

execute.SPAN, processes._WORTH = 1, 0
run_batch = processes.run_batch

def slowly(batch, sink):
    time.sleep(0.3)  # so that workers are busy when the parent ends
    run_batch(batch, sink)

processes.run_batch = slowly

parent = os.getpid()

def interrupted(*_):
    time.sleep(0.5 if os.getpid() == parent else 0)  # a worker that minds has time to say so
    raise KeyboardInterrupt

signal.signal(signal.SIGINT, interrupted)

def die(progress):
    if progress.done > progress.total // 3:
        print(Path(f"/proc/self/task/{os.getpid()}/children").read_text(), flush=True)
        (os.killpg if sys.argv[3] == "SIGINT" else os.kill)(os.getpid(), signal.Signals[sys.argv[3]])

try:
    run(sys.argv[1], sys.argv[2], workers=2, processes=True, on_progress=die)
except KeyboardInterrupt:
    os._exit(130)
"""


@pytest.mark.parametrize(("ended", "code"), [("SIGKILL", -9), ("SIGTERM", -15), ("SIGINT", 130)])
def test_a_parent_that_ends_leaves_no_worker_and_no_lock(tmp_path: Path, ended: str, code: int) -> None:
    """Ctrl-C reaches the whole group, the others the parent alone."""
    from safetensors.torch import save_file

    from merganser.recipes.running import run

    for name, tensors in zip(("base", "a", "b"), models(), strict=True):
        save_file(tensors, tmp_path / f"{name}.safetensors")
    recipe = tmp_path / "recipe.yml"
    recipe.write_text(
        f"method: ties\nbase: {tmp_path}/base.safetensors\n"
        f"models: [{tmp_path}/a.safetensors, {tmp_path}/b.safetensors]\n"
    )
    command = [sys.executable, "-c", PARENT, str(recipe), str(tmp_path / "out"), ended]
    said, complained = tmp_path / "stdout", tmp_path / "stderr"
    with said.open("w") as stdout, complained.open("w") as stderr:  # pipes would wait for the workers too
        done = subprocess.run(command, stdout=stdout, stderr=stderr, timeout=120, start_new_session=True)
    assert done.returncode == code, complained.read_text()
    orphans = [int(pid) for pid in said.read_text().split()]
    assert len(orphans) == 2
    run(recipe, tmp_path / "out", resume=True)  # at once: the lock died with the parent
    run(recipe, tmp_path / "reference")
    names = [tmp_path / directory / "model.safetensors" for directory in ("out", "reference")]
    assert names[0].read_bytes() == names[1].read_bytes()
    deadline = time.monotonic() + 30
    while any(_running(pid) for pid in orphans):
        assert time.monotonic() < deadline, "a worker outlived its parent"
        time.sleep(0.05)
    assert complained.read_text() == ""


def _running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
