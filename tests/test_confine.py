"""A path that a file names stays inside the directory of that file."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from merganser.confine import confine
from merganser.errors import CheckpointError


@pytest.mark.parametrize("name", ["a.safetensors", "experts/a.json", "..a", "a..b", "./a", "ä ö", "not/there/yet"])
def test_names_inside_are_paths_of_the_directory(tmp_path: Path, name: str) -> None:
    assert confine(tmp_path, name, "index") == tmp_path / name


TEXTS = ["", ".", "..", "../a", "a/../../b", "a/..", "/etc/hosts", "a\0b", "\ud800", "C:\\a", "..\\a", "\\\\host\\a"]
LONG = ["x" * 256, "a/" + "é" * 128, "x" * 5000]


@pytest.mark.parametrize("name", [*TEXTS, *LONG, None, 3, True, ["a"], {"a": 1}, b"a"])
def test_names_that_lead_elsewhere_are_refused(tmp_path: Path, name: object) -> None:
    with pytest.raises(CheckpointError, match="^index: "):
        confine(tmp_path, name, "index")


def test_links_count_by_where_they_lead(tmp_path: Path) -> None:
    outside, inside = tmp_path / "outside", tmp_path / "model"
    outside.mkdir()
    inside.mkdir()
    (inside / "real").write_text("x")
    (inside / "near").symlink_to("real")
    (inside / "far").symlink_to(outside / "secret")
    (inside / "folder").symlink_to(outside)
    assert confine(inside, "near", "index") == inside / "near"
    for name in ("far", "folder/secret", "folder"):
        with pytest.raises(CheckpointError, match="leads out of"):
            confine(inside, name, "index")


def test_a_directory_may_itself_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert confine(tmp_path / "link", "a", "index") == tmp_path / "link" / "a"


def test_snapshots_of_the_hub_link_to_their_own_blobs(tmp_path: Path) -> None:
    mine, other = tmp_path / "models--a--b", tmp_path / "models--c--d"
    snapshot = mine / "snapshots" / "0123"
    for directory in (snapshot / "2_Dense", mine / "blobs", other / "blobs"):
        directory.mkdir(parents=True)
    (mine / "blobs" / "f00").write_text("x")
    (other / "blobs" / "f00").write_text("x")
    (snapshot / "own").symlink_to("../../blobs/f00")
    (snapshot / "2_Dense" / "own").symlink_to("../../../blobs/f00")
    (snapshot / "others").symlink_to(other / "blobs" / "f00")
    (snapshot / "refs").symlink_to("../../refs")
    assert confine(snapshot, "own", "index").read_text() == "x"
    assert confine(snapshot, "2_Dense/own", "index").read_text() == "x"
    assert confine(snapshot / "2_Dense", "own", "index").read_text() == "x"
    for name in ("others", "refs"):
        with pytest.raises(CheckpointError, match="leads out of"):
            confine(snapshot, name, "index")


@given(st.text(max_size=30) | st.lists(st.sampled_from(["..", ".", "a", "/", "\\"]), max_size=6).map("/".join))
def test_whatever_is_accepted_lies_inside(name: str) -> None:
    directory = Path("/no/such/directory")
    try:
        path = confine(directory, name, "index")
    except CheckpointError:
        return
    assert path.resolve().is_relative_to(directory)
    assert path.resolve() != directory
