"""The base of a folder is found by its name or by its weights."""

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from merganser.studio.discovery import discover
from merganser.studio.families import find_family
from merganser.studio.roots import Roots


def put(folder, name, tensor, architecture="TinyForCausalLM"):
    (folder / name).mkdir()
    save_file({"layers.0.weight": tensor, "norm.weight": torch.ones(4)}, folder / name / "model.safetensors")
    (folder / name / "config.json").write_text(json.dumps({"architectures": [architecture]}))


def family(folder):
    roots = Roots([folder])
    return find_family(roots, discover(roots))


@pytest.fixture
def tuned(tmp_path):
    """Three fine-tunes of one model; `early`, the first by name and the oldest, is not their base."""
    start = torch.randn(64, 32, generator=torch.Generator().manual_seed(9))
    for seed, name in enumerate(("early", "late", "middle", "start")):
        moved = torch.randn(64, 32, generator=torch.Generator().manual_seed(seed))
        put(tmp_path, name, start + 0.1 * (name != "start") * moved)
    return tmp_path


def test_the_base_is_nearest_to_the_others(tuned):
    found = family(tuned)
    assert found["base"] == "start"
    assert sorted(found["models"]) == ["early", "late", "middle"]


def test_the_family_is_found_without_importing_torch(tuned):
    program = (
        "import sys; from merganser.studio.discovery import discover; from merganser.studio.roots import Roots;"
        "from merganser.studio.families import find_family; roots = Roots([sys.argv[1]]);"
        "print(find_family(roots, discover(roots))['base'], 'torch' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", program, str(tuned)], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == [find_family(Roots([tuned]), discover(Roots([tuned])))["base"], "False"]


def test_a_merge_between_them_is_not_taken_for_the_base(tuned):
    put(tuned, "merged", torch.zeros(64, 32))
    (tuned / "merged" / "merganser.lock.json").write_text("{}")
    assert family(tuned)["base"] == "start"
    assert "merged" not in family(tuned)["models"]


def test_a_model_called_base_is_the_base(tuned):
    put(tuned, "my-base", torch.ones(64, 32))
    assert family(tuned)["base"] == "my-base"


def test_a_base_is_found_among_many_and_a_file_cut_short_is_left_out(tuned):
    for number in range(20):
        put(tuned, f"tune-{number}", torch.randn(64, 32))
    put(tuned, "the-base", torch.ones(64, 32))
    file = tuned / "the-base" / "model.safetensors"
    os.utime(file, (1, 1))
    assert family(tuned)["base"] == "the-base"
    file.write_bytes(file.read_bytes()[:-8])
    assert family(tuned)["base"] != "the-base"
    assert "the-base" not in family(tuned)["models"]
    [found] = [item for item in discover(Roots([tuned])) if item.path == "the-base"]
    assert found.facts["damaged"]


def test_models_of_other_sizes_are_other_families(tuned):
    put(tuned, "small", torch.ones(8, 4))
    put(tuned, "encoder", torch.ones(64, 32), "TinyModel")
    assert {"small", "encoder"}.isdisjoint(family(tuned)["models"])


def test_a_folder_without_two_models_has_no_base(tmp_path):
    assert family(tmp_path) == {"base": None, "models": []}
    put(tmp_path, "one", torch.ones(4, 4))
    assert family(tmp_path) == {"base": None, "models": ["one"]}
    put(tmp_path, "two", torch.ones(4, 4))
    assert family(tmp_path)["base"] in ("one", "two")


def test_a_damaged_model_does_not_hide_the_family(tuned):
    file = tuned / "late" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert family(tuned)["base"] is not None


def test_sizes_and_dtypes_are_those_of_the_files(tuned):
    items = {item.path: item for item in discover(Roots([tuned]))}
    assert items["start"].facts["dtypes"] == ["float32"]
    library = tuned / "library"
    (library / "experts").mkdir(parents=True)
    (library / "library.json").write_text("{}")
    (library / "experts" / "a.safetensors").write_bytes(bytes(1000))
    [found] = [item for item in discover(Roots([tuned])) if item.kind == "library"]
    assert found.bytes == 1002
