"""Faults at every boundary at which the disk is touched, then --resume: the same bytes."""

from __future__ import annotations

import errno
import hashlib
from pathlib import Path

import pytest
from torch import Tensor

from merganser.engine.disk import Disk
from merganser.engine.execute import execute
from merganser.engine.writer import CheckpointWriter
from merganser.errors import InputError, MerganserError
from support.plans import make_plan, random_models


class Faulty(Disk):
    """Fails at its n-th operation; a `dead` disk fails at every one after that too, like a killed process."""

    def __init__(self, at: int = -1, error: OSError | None = None) -> None:
        self.at = at
        self.count = 0
        self.error = error or OSError(errno.EIO, "injected")
        self.operations: list[str] = []

    def before(self, operation: str, path: Path) -> None:
        self.operations.append(f"{operation} {path.name}")
        if 0 <= self.at <= self.count:
            raise self.error
        self.count += 1


MODELS = random_models(2)


def attempt(
    out: Path, disk: Disk, resume: bool = False, overwrite: bool = False, models: list[dict[str, Tensor]] = MODELS
) -> None:
    plan, sources = make_plan(models, "linear", shard_size=1_000_000)
    writer = CheckpointWriter(out, plan, "print", resume=resume, overwrite=overwrite, disk=disk, sync_seconds=0)
    try:
        if not writer.published:
            execute(plan, sources, writer, workers=1)
        writer.publish(lambda directory: disk.write_file(directory / "config.json", b"{}"))
    except BaseException:
        writer.abandon()
        raise


def digest(out: Path) -> str:
    files = sorted(p for p in out.iterdir())
    return hashlib.sha256(b"".join(p.name.encode() + p.read_bytes() for p in files)).hexdigest()


@pytest.mark.parametrize("replace", [False, True])
def test_every_boundary(tmp_path: Path, replace: bool) -> None:
    whole = Faulty()
    attempt(tmp_path / "reference", whole)
    expected = digest(tmp_path / "reference")
    assert {o.split()[0] for o in whole.operations} >= {
        "mkdir",
        "create",
        "write",
        "append",
        "sync",
        "rename",
        "remove",
    }
    for at in range(len(whole.operations) + (1 if replace else 0)):
        out = tmp_path / f"at{at}"
        if replace:
            out.mkdir()
            (out / "old").write_text("old")
        with pytest.raises((MerganserError, OSError)):
            attempt(out, Faulty(at), overwrite=replace)
        assert not out.exists() or digest(out) == expected or (replace and (out / "old").exists())
        if out.exists() and not out.with_name(f"{out.name}.partial").exists():
            assert replace
            attempt(out, Disk(), overwrite=True)
        elif not out.with_name(f"{out.name}.partial").exists():
            attempt(out, Disk())
        else:
            attempt(out, Disk(), resume=True)
        assert digest(out) == expected
        assert not out.with_name(f"{out.name}.partial").exists()


def test_resume_does_not_repeat_what_is_done(tmp_path: Path) -> None:
    counting = Faulty()
    attempt(tmp_path / "reference", counting)
    writes = [i for i, o in enumerate(counting.operations) if o.startswith("append")]
    with pytest.raises(MerganserError):
        attempt(tmp_path / "out", Faulty(writes[4]))
    again = Faulty()
    attempt(tmp_path / "out", again, resume=True)
    assert len(again.operations) < len(counting.operations)


def test_a_full_disk_leaves_a_resumable_state(tmp_path: Path) -> None:
    with pytest.raises(MerganserError, match="no room left on the disk .* --resume"):
        attempt(tmp_path / "out", Faulty(9, OSError(errno.ENOSPC, "full")))
    attempt(tmp_path / "out", Disk(), resume=True)
    attempt(tmp_path / "reference", Disk())
    assert digest(tmp_path / "out") == digest(tmp_path / "reference")


def test_a_torn_journal_line_is_forgotten(tmp_path: Path) -> None:
    with pytest.raises(MerganserError):
        attempt(tmp_path / "out", Faulty(25))
    journal = tmp_path / "out.partial" / "journal"
    content = journal.read_bytes()
    for cut in range(1, 40, 7):
        journal.write_bytes(content[:-cut] or b"")
        attempt(tmp_path / "out", Disk(), resume=True)
        attempt(tmp_path / "reference", Disk(), overwrite=True)
        assert digest(tmp_path / "out") == digest(tmp_path / "reference")
        (tmp_path / "out").rename(tmp_path / f"done{cut}")
        with pytest.raises(MerganserError):
            attempt(tmp_path / "out", Faulty(25))
        content = journal.read_bytes()


def test_refusals(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(InputError, match="exists already"):
        attempt(tmp_path / "out", Disk())
    with pytest.raises(MerganserError):
        attempt(tmp_path / "new", Faulty(20))
    with pytest.raises(
        InputError, match=r"--resume \(resume=True\) continues it, --overwrite \(overwrite=True\) starts again"
    ):
        attempt(tmp_path / "new", Disk())
    plan, _ = make_plan(MODELS, "linear")
    with pytest.raises(InputError, match="begun with another recipe"):
        CheckpointWriter(tmp_path / "new", plan, "other", resume=True)
    (tmp_path / "new.partial" / "thesis.tex").write_text("mine")
    with pytest.raises(InputError, match="not ours: it holds 'thesis.tex'"):
        attempt(tmp_path / "new", Disk(), overwrite=True)
    assert (tmp_path / "new.partial" / "thesis.tex").exists()
    (tmp_path / "plain.partial").write_text("mine")
    with pytest.raises(InputError, match=r"plain.partial is in the way and not ours: it is not a directory"):
        attempt(tmp_path / "plain", Disk(), overwrite=True)


def test_a_broken_link_is_refused_before_work_or_replaced(tmp_path: Path) -> None:
    (tmp_path / "out").symlink_to("nowhere")
    with pytest.raises(InputError, match="out is a broken link"):
        attempt(tmp_path / "out", Disk())
    assert not (tmp_path / "out.partial").exists()
    attempt(tmp_path / "out", Disk(), overwrite=True)
    assert (tmp_path / "out").is_dir()
    assert not (tmp_path / "out").is_symlink()


def test_only_one_process_writes(tmp_path: Path) -> None:
    plan, _ = make_plan(MODELS, "linear")
    first = CheckpointWriter(tmp_path / "out", plan, "x")
    for options in ({"resume": True}, {"overwrite": True}):
        with pytest.raises(InputError, match="another merge is writing there"):
            CheckpointWriter(tmp_path / "out", plan, "x", **options)
    first.abandon()


def test_too_little_disk_space_is_said_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 10})())
    with pytest.raises(InputError, match="the result needs .* bytes, 10 are free"):
        attempt(tmp_path / "out", Disk())
    assert not (tmp_path / "out.partial").exists()
