import os
from pathlib import Path

import pytest
import torch

import merganser as mg
from merganser.engine.publishing import check_out, publish
from merganser.errors import InputError, MerganserError


def test_a_directory_appears_whole_and_takes_the_place_of_another(tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"
    for content in ("first", "second"):
        assert publish(out, lambda d, content=content: (d / "file").write_text(content), overwrite=True) == out
        assert (out / "file").read_text() == content
    assert os.listdir(out.parent) == ["out"]


@pytest.mark.parametrize("error", [ValueError("no"), OSError("full")])
def test_a_failure_leaves_everything_as_it_was(tmp_path: Path, error: Exception) -> None:
    out = publish(tmp_path / "out", lambda d: (d / "file").write_text("old"))

    def fail(directory: Path) -> None:
        (directory / "file").write_text("half")
        raise error

    with pytest.raises(MerganserError if isinstance(error, OSError) else ValueError):
        publish(out, fail, overwrite=True)
    assert (out / "file").read_text() == "old"
    assert os.listdir(tmp_path) == ["out"]


def test_places_that_cannot_be_written_are_refused_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "model.safetensors").touch()
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    with pytest.raises(InputError, match="exists already"):
        check_out(taken, overwrite=False)
    check_out(taken, overwrite=True)
    check_out(tmp_path / "a" / "b", overwrite=False)
    with pytest.raises(InputError, match=r"the input .* is in it"):
        check_out(taken, overwrite=True, inputs=[taken / "model.safetensors"])
    with pytest.raises(InputError, match="broken link"):
        check_out(tmp_path / "broken", overwrite=False)
    with pytest.raises(InputError, match="is not a directory"):
        check_out(taken / "model.safetensors" / "out", overwrite=False)
    monkeypatch.chdir(taken)
    for out in (taken, tmp_path):
        with pytest.raises(InputError, match="current directory"):
            check_out(out, overwrite=True)
    with pytest.raises(InputError, match="not a name"):
        check_out(Path(".."), overwrite=True)


def test_names_leave_room_for_those_of_the_files_beside_them(tmp_path: Path) -> None:
    weights = {"w": torch.ones(2)}
    longest = os.pathconf(tmp_path, "PC_NAME_MAX") - 32
    for name in ("x" * longest, "x" * (longest - 12) + ".safetensors"):
        assert torch.equal(mg.open(mg.save(weights, tmp_path / name))["w"], weights["w"])
    for name in ("x" * 300, "ü" * 120):
        with pytest.raises(InputError, match=f"bytes; at most {longest} fit here"):
            mg.save(weights, tmp_path / name)
