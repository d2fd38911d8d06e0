"""Expert libraries that are damaged, interrupted, moved, or asked for the impossible: it is named, nothing is lost."""

import os
import signal
import subprocess
import sys
import textwrap

import pytest
import torch

from merganser.engine.disk import Disk
from merganser.errors import CheckpointError, InputError, MerganserError
from merganser.library import Library
from merganser.library.manifest import lock_library
from support.library_models import base_tensors, expert_tensors, experts


def test_a_moved_or_wrong_base_is_named(models, tmp_path):
    Library.build(models["base"], experts(models), tmp_path / "lib")
    models["base"].rename(tmp_path / "moved")
    with pytest.raises(CheckpointError, match="base cannot be opened"):
        Library(tmp_path / "lib")
    assert len(Library(tmp_path / "lib", base=tmp_path / "moved")) == 3
    with pytest.raises(CheckpointError, match="not the base"):
        Library(tmp_path / "lib", base=models["math"])


def test_a_copied_base_travels_along(models, tmp_path):
    Library.build(models["base"], experts(models), tmp_path / "lib", copy_base=True)
    (tmp_path / "lib").rename(tmp_path / "elsewhere")
    library = Library(tmp_path / "elsewhere")
    assert library.base.label == str(tmp_path / "elsewhere/base")
    assert all(finding.sound for finding in library.verify())


def test_damage_is_found_and_named(models, tmp_path):
    library = Library.build(models["base"], experts(models), tmp_path / "lib")
    path = tmp_path / "lib/experts/code.safetensors"
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"code\.safetensors: damaged: its checksum"):
        library.expert("code")
    assert [f.part for f in library.verify() if not f.sound] == ["code"]
    path.write_bytes(content[:-8])
    with pytest.raises(CheckpointError, match="bytes instead of"):
        library.expert("code")
    path.unlink()
    with pytest.raises(CheckpointError, match="missing"):
        library.expert("code")
    (tmp_path / "lib/experts/stray.safetensors").write_bytes(b"x")
    assert [f.part for f in library.verify() if not f.sound] == ["code", "stray.safetensors"]


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"format": "x"}', '{"format": "merganser-experts", "version": 9}', "{}"]
)
def test_a_bad_manifest_is_named(tmp_path, content):
    (tmp_path / "library.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"library\.json"):
        Library(tmp_path)


def test_a_build_that_was_killed_goes_on(models, tmp_path):
    paths = {name: str(path) for name, path in models.items()}
    program = textwrap.dedent(f"""
        import os, signal
        from merganser.library import Library
        from merganser.library.building import Compressor
        compress = Compressor.compress
        def dying(self, name, *others):
            if name == "code":
                (self.directory / "experts/code.safetensors.partial").write_bytes(b"half")
                os.kill(os.getpid(), signal.SIGKILL)
            return compress(self, name, *others)
        Compressor.compress = dying
        paths = {paths!r}
        Library.build(paths.pop("base"), paths, {str(tmp_path / "lib")!r}, energy=0.9)
    """)
    killed = subprocess.run([sys.executable, "-c", program], env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False)
    assert killed.returncode == -signal.SIGKILL
    with pytest.raises(CheckpointError, match="incomplete: chat, code not finished"):
        Library(tmp_path / "lib")
    finished = (tmp_path / "lib/experts/math.safetensors").stat()
    with pytest.raises(InputError, match="another rule for ranks"):
        Library.build(models["base"], experts(models), tmp_path / "lib", energy=0.5)
    library = Library.build(models["base"], experts(models), tmp_path / "lib", energy=0.9)
    assert (tmp_path / "lib/experts/math.safetensors").stat().st_mtime_ns == finished.st_mtime_ns
    whole = Library.build(models["base"], experts(models), tmp_path / "whole", energy=0.9)
    for name in experts(models):
        assert torch.equal(library.expert(name).read("a.weight"), whole.expert(name).read("a.weight"))
    assert all(finding.sound for finding in library.verify())
    with pytest.raises(InputError, match="finished library"):
        Library.build(models["base"], experts(models), tmp_path / "lib", energy=0.9)


def test_input_is_checked_first(models, tmp_path):
    with pytest.raises(InputError, match="choose one of"):
        Library.build(models["base"], experts(models), tmp_path / "lib", energy=0.5, budget=100)
    with pytest.raises(InputError, match="cannot name an expert"):
        Library.build(models["base"], {"../x": models["math"]}, tmp_path / "lib")
    with pytest.raises(InputError, match="in \\(0, 1\\]"):
        Library.build(models["base"], experts(models), tmp_path / "lib", energy=1.5)
    for budget in (-1, float("nan"), float("inf")):
        with pytest.raises(InputError, match="must be a number of bytes"):
            Library.build(models["base"], experts(models), tmp_path / "lib", budget=budget)
    with pytest.raises(InputError, match="did you mean 'float16'"):
        Library.build(models["base"], experts(models), tmp_path / "lib", dtype="flot16")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/notes.txt").write_text("mine")
    with pytest.raises(InputError, match="not an expert library"):
        Library.build(models["base"], experts(models), tmp_path / "full")
    lacking = {name: tensor for name, tensor in base_tensors().items() if name != "bias"}
    with pytest.raises(CheckpointError, match="no tensor 'bias'"):
        Library.build(models["base"], {"e": lacking}, tmp_path / "lib")
    assert not (tmp_path / "lib").exists()


def test_one_process_at_a_time_changes_a_library(models, tmp_path):
    library = Library.build(models["base"], {"math": models["math"]}, tmp_path / "lib")
    with lock_library(library.path):
        with pytest.raises(InputError, match="another process is writing there"):
            library.add("code", models["code"])
        with pytest.raises(InputError, match="another process is writing there"):
            library.remove("math")
    assert library.add("code", models["code"]).experts == ("math", "code")


def test_a_library_can_change_where_the_file_system_has_no_locks(models, tmp_path, monkeypatch):
    def refuse(handle, how):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", refuse)
    library = Library.build(models["base"], {"math": models["math"]}, tmp_path / "lib")
    assert library.add("code", models["code"]).experts == ("math", "code")


def test_a_budget_that_is_too_small_leaves_nothing_behind(models, tmp_path):
    with pytest.raises(InputError, match="too small"):
        Library.build(models["base"], experts(models), tmp_path / "lib", budget=10)
    assert not (tmp_path / "lib").exists()
    library = Library.build(models["base"], experts(models), tmp_path / "lib", budget=20_000)
    assert library.experts == tuple(experts(models))


def test_an_impossible_place_is_named(models, tmp_path):
    (tmp_path / "file").write_text("mine")
    for place in (tmp_path / "file", tmp_path / "file/lib", "/proc/lib", tmp_path / ("x" * 300)):
        with pytest.raises(InputError, match=r"cannot be created"):
            Library.build(models["base"], experts(models), place)
    with pytest.raises(CheckpointError, match="not an expert library"):
        Library(tmp_path / "file")


@pytest.mark.parametrize("tensor", ["a.weight", "bias", "head"])
@pytest.mark.parametrize(("value", "what"), [(float("nan"), "NaN"), (float("-inf"), "infinite values")])
def test_experts_that_are_not_finite_are_refused(models, tmp_path, tensor, value, what):
    base = base_tensors()
    bad = expert_tensors(base, 1) | {"head": torch.zeros(3)}
    bad[tensor] = bad[tensor].clone()
    bad[tensor].view(-1)[1] = value
    message = f"expert 'bad', state dict: tensor '{tensor}' contains {what}"
    with pytest.raises(CheckpointError, match=message):
        Library.build(models["base"], {"bad": bad}, tmp_path / "lib")
    assert not (tmp_path / "lib").exists()
    library = Library.build(models["base"], {"math": models["math"]}, tmp_path / "lib", rank_fraction=0.2)
    with pytest.raises(CheckpointError, match=message):
        library.add("bad", bad)
    assert Library(tmp_path / "lib").experts == ("math",)


def test_what_is_infinite_in_the_base_too_is_no_change(tmp_path):
    base = base_tensors() | {"mask": torch.full((4, 4), float("-inf"))}
    library = Library.build(base, {"e": expert_tensors(base, 1)}, tmp_path / "lib")
    assert torch.equal(library.merge().read("mask"), base["mask"])
    with pytest.raises(CheckpointError, match="lib/base: tensor 'mask' contains infinite values"):
        library.add("f", base | {"mask": torch.zeros(4, 4)})


@pytest.mark.parametrize("beside", [[], [".lock"], ["experts"], ["experts", ".lock"]])
def test_a_base_that_is_not_its_own_copy_is_never_replaced(models, tmp_path, beside):
    mine = tmp_path / "lib/base/model.safetensors"
    mine.parent.mkdir(parents=True)
    mine.write_bytes(b"mine")
    for name in beside:
        (tmp_path / "lib" / name).mkdir() if name == "experts" else (tmp_path / "lib" / name).touch()
    with pytest.raises(InputError, match="not an expert library|exists"):
        Library.build(models["base"], experts(models), tmp_path / "lib", copy_base=True)
    assert mine.read_bytes() == b"mine"
    assert sorted(path.name for path in (tmp_path / "lib").iterdir()) == sorted({"base", *beside})


def test_the_experts_of_a_library_that_lost_its_manifest_are_kept(models, tmp_path):
    Library.build(models["base"], experts(models), tmp_path / "lib", copy_base=True)
    (tmp_path / "lib/library.json").unlink()
    with pytest.raises(InputError, match="not an expert library"):
        Library.build(models["base"], experts(models), tmp_path / "lib", copy_base=True)
    assert len(list((tmp_path / "lib/experts").iterdir())) == 3


def test_a_full_disk_is_named_and_the_build_goes_on(models, tmp_path, monkeypatch):
    def full(self, operation, path):
        if path.name == "code.safetensors.partial":
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Disk, "before", full)
        with pytest.raises(MerganserError, match=r"lib: could not be written: .*No space.*run the same again"):
            Library.build(models["base"], experts(models), tmp_path / "lib")
    library = Library.build(models["base"], experts(models), tmp_path / "lib")
    assert all(finding.sound for finding in library.verify())
