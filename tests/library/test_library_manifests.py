"""Manifests that lie, bases that changed, removals that were cut short: nothing outside the library is touched."""

import copy
import json

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from merganser.errors import CheckpointError, InputError
from merganser.library import Library, MaskLibrary
from merganser.library.manifest import Manifest
from merganser.library.storage import Disk
from support.library_models import experts


@pytest.fixture
def library(models, tmp_path):
    return Library.build(models["base"], experts(models), tmp_path / "lib", rank_fraction=0.2)


def manifest_of(library):
    return json.loads((library.path / "library.json").read_text())


def rewrite(library, content):
    (library.path / "library.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    "file", ["../precious.txt", "/tmp/precious.txt", "experts/../../precious.txt", "library.json", ""]
)
def test_a_manifest_cannot_name_files_outside_its_experts(library, tmp_path, file):
    precious = tmp_path / "precious.txt"
    precious.write_text("mine")
    content = manifest_of(library)
    content["experts"]["math"]["file"] = file
    rewrite(library, content)
    for act in (lambda: Library(library.path), lambda: library.remove("math"), library.verify):
        with pytest.raises(CheckpointError, match=r"library\.json: experts: math|damaged"):
            act() if act != library.verify else Library(library.path).verify()
    assert precious.read_text() == "mine"
    assert (library.path / "library.json").exists()


def test_experts_behind_a_link_are_not_removed(library, tmp_path):
    (library.path / "experts").rename(tmp_path / "elsewhere")
    (library.path / "experts").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="leads out of"):
        library.remove("math")
    assert (tmp_path / "elsewhere/math.safetensors").exists()


def test_a_copied_base_stays_inside(models, tmp_path):
    library = Library.build(models["base"], experts(models), tmp_path / "lib", copy_base=True)
    rewrite(library, manifest_of(library) | {"base": "../base"})
    with pytest.raises(CheckpointError, match="not the name of a file inside"):
        Library(library.path)


def test_masks_cannot_name_experts_outside(models, tmp_path):
    masks = MaskLibrary.build(models["base"], experts(models), tmp_path / "masks")
    content = json.loads((masks.path / "masks.json").read_text())
    content["experts"]["../../math"] = {"scale": 1.0}
    (masks.path / "masks.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="cannot name an expert"):
        MaskLibrary(masks.path)


WRONG = [
    (("base",), 3),
    (("base_copied",), "yes"),
    (("base_fingerprint",), None),
    (("dtype",), "int4"),
    (("policy",), []),
    (("policy", "kind"), "magic"),
    (("policy", "value"), "1"),
    (("policy", "more"), 1),
    (("experts",), []),
    (("experts", "math"), "x"),
    (("experts", "math", "nbytes"), -1),
    (("experts", "math", "nbytes"), True),
    (("experts", "math", "energy"), None),
    (("experts", "math", "surprise"), 1),
    (("pending",), None),
    (("pending", "new"), {}),
    (("pending", "new"), {"fingerprint": "x", "room": 1, "ranks": {"a": "2"}}),
    (("pending", "math"), {"fingerprint": "x", "room": 1, "ranks": {}}),
    (("pending", "../x"), {"fingerprint": "x", "room": 1, "ranks": {}}),
    (("surprise",), 1),
    (("version",), True),
]


@pytest.mark.parametrize(("place", "value"), WRONG)
def test_every_field_is_checked(library, place, value):
    content = manifest_of(library)
    inner = content
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    rewrite(library, content)
    with pytest.raises(CheckpointError, match=r"library\.json"):
        Library(library.path)


def places(tree, path=()):
    yield path
    if isinstance(tree, dict):
        for key in tree:
            yield from places(tree[key], (*path, key))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), value=JSON)
def test_mutated_manifests_are_read_or_refused(library, data, value):
    original = manifest_of(library)
    try:
        content = copy.deepcopy(original)
        place = data.draw(st.sampled_from(list(places(content))[1:]))
        inner = content
        for key in place[:-1]:
            inner = inner[key]
        if data.draw(st.booleans()):
            del inner[place[-1]]
        else:
            inner[place[-1]] = value
        rewrite(library, content)
        try:
            found = Manifest.read(library.path)
        except CheckpointError:
            return
        for name, record in found.experts.items():
            assert record.file == f"experts/{name}.safetensors"
    finally:
        rewrite(library, original)


def test_deep_nesting_is_refused(library):
    (library.path / "library.json").write_text("[" * 200_000 + "]" * 200_000)
    with pytest.raises(CheckpointError, match="cannot be read"):
        Library(library.path)


def test_one_changed_weight_anywhere_in_the_base_is_found(tmp_path):
    torch.manual_seed(0)
    base = {f"layer.{i}.weight": torch.randn(256, 256) for i in range(8)}
    expert = {name: tensor + 0.01 * torch.randn_like(tensor) for name, tensor in base.items()}
    for name, tensors in (("base", base), ("expert", expert)):
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors")
    library = Library.build(tmp_path / "base", {"e": tmp_path / "expert"}, tmp_path / "lib")
    assert [finding.sound for finding in library.verify()] == [True, True]
    before = library.base.fingerprint()
    moved = load_file(tmp_path / "base/model.safetensors")
    moved["layer.3.weight"][100, 100] += 1e-3
    save_file(moved, tmp_path / "base/model.safetensors")
    again = Library(tmp_path / "lib")
    assert again.base.fingerprint() == before, "a sample of the pages does not see it"
    found = {finding.part: finding for finding in again.verify()}
    assert found["base"].sound is False
    assert "have changed since" in found["base"].message
    assert found["e"].sound


def test_a_library_without_a_checksum_of_its_base_is_not_called_sound(library):
    content = manifest_of(library) | {"version": 1}
    del content["base_sha256"]
    rewrite(library, content)
    old = Library(library.path)
    finding = old.verify()[0]
    assert (finding.part, finding.sound) == ("base", None)
    assert "no checksum" in finding.message
    assert all(torch.equal(old.expert(n).read("a.weight"), library.expert(n).read("a.weight")) for n in old.experts)


class Killed(BaseException):
    pass


def dying(monkeypatch, at):
    """The process ends before the operation with this number; says whether there was one."""
    count = iter(range(1000))

    def before(self, operation, path):
        if next(count) == at:
            raise Killed(operation, path)

    monkeypatch.setattr(Disk, "before", before)


def test_a_removal_that_was_killed_anywhere_can_be_repeated(models, tmp_path, monkeypatch):
    points = 0
    for at in range(20):
        library = Library.build(models["base"], experts(models), tmp_path / f"lib{at}")
        (library.path / "experts/code.safetensors.partial").write_bytes(b"left by another crash")
        with monkeypatch.context() as patch:
            dying(patch, at)
            try:
                library.remove("code")
                killed = False
            except Killed:
                killed = True
                points += 1
        again = Library(library.path)  # opens, whatever happened
        for name in again.experts:
            again.expert(name)
        left = again if not killed else again.remove("code")
        assert left.experts == ("math", "chat")
        assert [f.part for f in left.verify() if f.sound is not True] == []
        assert sorted(p.name for p in (left.path / "experts").iterdir()) == ["chat.safetensors", "math.safetensors"]
        with pytest.raises(InputError, match="has no expert 'code'"):
            left.remove("code")
        if not killed:
            break
    assert points >= 4, "manifest written, renamed, file removed, leftover removed"


def test_an_addition_that_was_killed_anywhere_can_be_repeated(models, tmp_path, monkeypatch):
    for at in range(20):
        library = Library.build(models["base"], {"math": models["math"]}, tmp_path / f"lib{at}")
        with monkeypatch.context() as patch:
            dying(patch, at)
            try:
                library.add("code", models["code"])
                break
            except Killed:
                pass
        again = Library(library.path)
        assert again.experts == ("math",)
        grown = again.add("code", models["code"])
        assert all(finding.sound for finding in grown.verify())
    assert at >= 4
