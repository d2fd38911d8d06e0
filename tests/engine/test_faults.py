"""Faults at every boundary at which the disk is touched, then --resume: the same bytes."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from crash.faults import KILLED, Counting, Failing, Halving, end, in_child
from crash.merges import MODELS, digest, is_old, make_old, merge, strays, wrong
from merganser.engine.disk import Disk
from merganser.engine.writer import CheckpointWriter, Destination
from merganser.errors import InputError, MerganserError
from support.plans import make_plan

#: Disks that go wrong at an operation.
FAULTS: dict[str, Callable[[int], Disk]] = {
    "killed": lambda at: Counting(at, end),
    "torn": Halving,
    "error": Failing,
    "dead": lambda at: Failing(at, dead=True),
    "full": lambda at: Failing(at, code=errno.ENOSPC),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[str]]:
    """The digest of the result, and the operations it takes to replace something by it."""
    directory = tmp_path_factory.mktemp("whole")
    make_old(directory / "out")
    disk = Counting()
    merge(directory / "out", disk, overwrite=True)
    assert os.listdir(directory) == ["out"]
    return digest(directory / "out"), disk.operations


def test_the_operations_are_all_there(whole: tuple[str, list[str]]) -> None:
    kinds = {"mkdir", "create", "write", "append", "sync", "rename", "remove", "lock", "open"}
    assert set(whole[1]) == kinds


#: At which operations: a dead and a full disk fail like an error, and differ in what comes after it.
WHERE = {"dead": slice(0, None, 2), "full": slice(1, None, 2)}


@pytest.mark.parametrize(("fault", "replace"), [*((fault, True) for fault in FAULTS), ("killed", False)])
def test_every_boundary(tmp_path: Path, whole: tuple[str, list[str]], fault: str, replace: bool) -> None:
    expected, operations = whole
    for at in range(len(operations))[WHERE.get(fault, slice(None))]:
        directory = tmp_path / str(at)
        directory.mkdir()
        out = directory / "out"
        if replace:
            make_old(out)
        ended = in_child(lambda at=at, out=out: merge(out, FAULTS[fault](at), overwrite=replace))
        assert ended in (0, 1, KILLED)
        assert wrong(out, expected, replace) == "", f"at {at}, {operations[at]}"
        merge(out, resume=True, overwrite=replace)
        assert digest(out) == expected
        assert strays(directory) == [], f"at {at}, {operations[at]}"


@pytest.mark.parametrize("replace", [False, True])
def test_starting_again_with_another_recipe(tmp_path: Path, whole: tuple[str, list[str]], replace: bool) -> None:
    merge(tmp_path / "reference", others=True)
    expected = digest(tmp_path / "reference")
    for at in range(replace, len(whole[1]), 2):
        directory = tmp_path / str(at)
        directory.mkdir()
        out = directory / "out"
        if replace:
            make_old(out)
        in_child(lambda at=at, out=out: merge(out, Counting(at, end), overwrite=replace))
        # killed again while it clears up, at a different place each time
        in_child(lambda at=at, out=out: merge(out, Counting(at % 9, end), overwrite=True, others=True))
        moved = directory / "out.partial" / "replaced"
        assert not replace or is_old(out) or is_old(moved) or digest(out) in (expected, whole[0])
        merge(out, overwrite=True, others=True)
        assert digest(out) == expected
        assert strays(directory) == []


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_second_process_is_refused_at_every_moment(
    tmp_path: Path, whole: tuple[str, list[str]], overwrite: bool
) -> None:
    expected, operations = whole
    for at in range(operations.index("lock") + 1, len(operations)):
        out = tmp_path / str(at) / "out"
        out.parent.mkdir()
        make_old(out)
        refused: list[str] = []

        def second(out: Path = out, refused: list[str] = refused) -> None:
            for options in ({"overwrite": overwrite}, {"resume": True, "overwrite": overwrite}):
                with pytest.raises(InputError, match="another process|exists already|unfinished") as caught:
                    merge(out, others=True, **options)
                refused.append(str(caught.value))

        merge(out, Counting(at, second), overwrite=True)
        assert len(refused) == 2
        assert digest(out) == expected
        assert strays(out.parent) == []


def test_two_processes_at_once_end_with_one_result(tmp_path: Path, whole: tuple[str, list[str]]) -> None:
    """Both replace the same directory, one after the other or one of them not at all: never a mixture."""
    merge(tmp_path / "reference", others=True)
    results = {whole[0], digest(tmp_path / "reference")}
    for number in range(12):
        out = tmp_path / f"{number}" / "out"
        out.parent.mkdir()
        make_old(out)
        children = []
        for others in (False, True):
            child = os.fork()
            if not child:
                try:
                    merge(out, overwrite=True, others=others)
                    os._exit(0)
                except InputError:
                    os._exit(2)
                except BaseException:
                    os._exit(1)
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        assert sorted(codes) in ([0, 0], [0, 2])
        assert digest(out) in results
        assert strays(out.parent) == []


def stop_after(out: Path, appends: int) -> None:
    """A merge that is ended before it journals that many times."""
    counting = Counting()
    merge(out.with_name("counted"), counting)
    at = [number for number, operation in enumerate(counting.operations) if operation == "append"][appends]
    assert in_child(lambda: merge(out, Counting(at, end))) == KILLED


def test_resume_does_not_repeat_what_is_done(tmp_path: Path) -> None:
    stop_after(tmp_path / "out", 4)
    again = Counting()
    merge(tmp_path / "out", again, resume=True)
    whole = Counting()
    merge(tmp_path / "reference", whole)
    assert again.operations.count("append") < whole.operations.count("append")


def test_a_full_disk_leaves_a_resumable_state(tmp_path: Path) -> None:
    with pytest.raises(MerganserError, match="no space left on the disk .* resume=True"):
        merge(tmp_path / "out", Failing(12, code=errno.ENOSPC))
    merge(tmp_path / "out", resume=True)
    merge(tmp_path / "reference")
    assert digest(tmp_path / "out") == digest(tmp_path / "reference")


def test_a_file_that_is_too_large_is_not_a_full_disk(tmp_path: Path) -> None:
    with pytest.raises(MerganserError, match="larger than .*ulimit -f.* smaller shard_size"):
        merge(tmp_path / "out", Failing(12, code=errno.EFBIG))
    merge(tmp_path / "out", resume=True)


def test_a_torn_journal_line_is_forgotten(tmp_path: Path) -> None:
    merge(tmp_path / "reference")
    for cut in range(1, 40, 7):
        out = tmp_path / str(cut) / "out"
        out.parent.mkdir()
        stop_after(out, 5)
        journal = out.with_name("out.partial") / "journal"
        journal.write_bytes(journal.read_bytes()[:-cut])
        merge(out, resume=True)
        assert digest(out) == digest(tmp_path / "reference")


@pytest.mark.parametrize("damage", ["flip", "zero", "swap", "cut", "remove"])
def test_finished_tensors_that_were_damaged_are_made_again(tmp_path: Path, damage: str) -> None:
    stop_after(tmp_path / "out", 5)
    for file in sorted((tmp_path / "out.partial" / "model").iterdir()):
        content = bytearray(file.read_bytes())
        header = 8 + int.from_bytes(content[:8], "little")
        body = content[header:]
        if damage == "flip":
            body[len(body) // 2] ^= 1
        elif damage == "zero":
            body = bytearray(len(body))
        elif damage == "swap":
            body[:64], body[64:128] = body[64:128], body[:64]
        file.write_bytes(content[:header] + (body[: len(body) // 2] if damage == "cut" else body))
        if damage == "remove":
            file.unlink()
    merge(tmp_path / "out", resume=True)
    merge(tmp_path / "reference")
    assert digest(tmp_path / "out") == digest(tmp_path / "reference")


def test_a_directory_that_appears_meanwhile_is_left_alone(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(MerganserError, match=r"out was created since the merge began and is not replaced.*resume=True"):
        merge(out, Counting(16, lambda: make_old(out)))
    assert is_old(out)
    with pytest.raises(MerganserError, match="was created since"):
        merge(out, resume=True)
    assert is_old(out)
    merge(out, resume=True, overwrite=True)
    merge(tmp_path / "reference")
    assert digest(out) == digest(tmp_path / "reference")
    assert strays(tmp_path) == []


@pytest.mark.parametrize("kind", ["file", "link"])
def test_whatever_appears_meanwhile_is_left_alone(tmp_path: Path, kind: str) -> None:
    out = tmp_path / "out"
    make_old(tmp_path / "elsewhere")
    appear = (lambda: out.write_text("mine")) if kind == "file" else (lambda: out.symlink_to("elsewhere"))
    with pytest.raises(MerganserError, match="was created since"):
        merge(out, Counting(16, appear))
    assert out.read_text() == "mine" if kind == "file" else out.is_symlink()
    out.unlink()
    merge(out, resume=True)
    assert is_old(tmp_path / "elsewhere")


def test_an_empty_directory_is_a_place_to_write(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    merge(tmp_path / "out")
    merge(tmp_path / "reference")
    assert digest(tmp_path / "out") == digest(tmp_path / "reference")


def test_what_was_to_be_replaced_is_mentioned_and_put_back(tmp_path: Path, whole: tuple[str, list[str]]) -> None:
    out = tmp_path / "out"
    make_old(out)
    second = [number for number, operation in enumerate(whole[1]) if operation == "rename"][1]
    assert in_child(lambda: merge(out, Counting(second, end), overwrite=True)) == KILLED
    assert not out.exists()
    with pytest.raises(InputError, match=r"an unfinished merge, and the previous .*out in replaced/"):
        merge(out)
    with pytest.raises(MerganserError, match="failed"):
        merge(out, Failing(14), others=True, overwrite=True)
    assert is_old(out)


def test_refusals(tmp_path: Path) -> None:
    make_old(tmp_path / "out")
    with pytest.raises(InputError, match="exists already"):
        merge(tmp_path / "out")
    stop_after(tmp_path / "new", 3)
    with pytest.raises(InputError, match=r"resume=True continues it, overwrite=True starts again"):
        merge(tmp_path / "new")
    with pytest.raises(InputError, match="started with another recipe"):
        merge(tmp_path / "new", others=True, resume=True)
    (tmp_path / "new.partial" / "thesis.tex").write_text("mine")
    with pytest.raises(InputError, match="not written by merganser: it contains 'thesis.tex'"):
        merge(tmp_path / "new", overwrite=True)
    assert (tmp_path / "new.partial" / "thesis.tex").exists()
    (tmp_path / "plain.partial").write_text("mine")
    with pytest.raises(InputError, match=r"plain.partial was not written by merganser: it is not a directory"):
        merge(tmp_path / "plain", overwrite=True)


@pytest.mark.parametrize("journal", [None, "Dear diary\n"])
def test_a_staging_directory_of_somebody_else_is_not_touched(tmp_path: Path, journal: str | None) -> None:
    theirs = tmp_path / "out.partial"
    (theirs / "model").mkdir(parents=True)
    (theirs / "model" / "thesis.tex").write_text("mine")
    if journal is not None:
        (theirs / "journal").write_text(journal)
    for options in ({}, {"resume": True}, {"overwrite": True}):
        with pytest.raises(InputError, match="out.partial was not written by merganser: it has no journal"):
            merge(tmp_path / "out", **options)
    assert (theirs / "model" / "thesis.tex").read_text() == "mine"
    assert journal is None or (theirs / "journal").read_text() == journal


def test_a_broken_link_is_refused_before_work_or_replaced(tmp_path: Path) -> None:
    (tmp_path / "out").symlink_to("nowhere")
    with pytest.raises(InputError, match="out is a broken link"):
        merge(tmp_path / "out")
    assert not (tmp_path / "out.partial").exists()
    merge(tmp_path / "out", overwrite=True)
    assert (tmp_path / "out").is_dir()
    assert not (tmp_path / "out").is_symlink()


def test_only_one_process_writes(tmp_path: Path) -> None:
    plan, _ = make_plan(MODELS, "linear")
    first = CheckpointWriter(Destination(tmp_path / "out"), plan, "x")
    for options in ({}, {"resume": True}, {"overwrite": True}):
        with pytest.raises(InputError, match="another process is writing there"):
            CheckpointWriter(Destination(tmp_path / "out", **options), plan, "x")
    first.abandon()


def test_too_little_disk_space_is_said_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 10})())
    with pytest.raises(InputError, match="the result needs .* bytes, but only 10 are free"):
        merge(tmp_path / "out")
    assert not (tmp_path / "out.partial").exists()
