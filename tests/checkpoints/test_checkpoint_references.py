"""Where `model+adapter` is cut, when a '+' is also part of a name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import merganser as mg
from merganser import recipes
from merganser.checkpoints.references import parts
from merganser.engine.directories import paths_in
from merganser.errors import CheckpointError
from merganser.recipes.references import locate

HERE = {"base", "lora", "more", "c++/base", "ad+x", "dir/ad+x/y", "both", "whole", "both+whole"}


@pytest.mark.parametrize(
    ("reference", "expected"),
    [
        ("base", ["base"]),
        ("base+lora", ["base", "lora"]),
        ("base+lora+more", ["base", "lora", "more"]),
        ("c++/base", ["c++/base"]),
        ("c++/base+lora", ["c++/base", "lora"]),
        ("c++/base+ad+x+more", ["c++/base", "ad+x", "more"]),
        ("both+whole", ["both+whole"]),
        ("owner/name", ["owner/name"]),
        ("owner/name@v1.0+owner/lora", ["owner/name@v1.0", "owner/lora"]),
        ("owner/name@v1.0+ad+x", ["owner/name@v1.0", "ad+x"]),
        ("owner/name+dir/ad+x/y", ["owner/name", "dir/ad+x/y"]),
        ("c++/base+absent", ["c++/base", "absent"]),
        ("absent+lora", ["absent", "lora"]),
        ("absent+neither", ["absent+neither"]),
        ("", [""]),
        ("+", ["+"]),
    ],
)
def test_the_way_of_which_most_is_found(reference: str, expected: list[str]) -> None:
    assert parts(reference, HERE.__contains__) == expected


@pytest.fixture
def adapter(tmp_path: Path, checkpoint: Callable[..., Path]) -> Path:
    """`c++/base` and the adapter `ad+x` in one directory."""
    checkpoint("c++/base", {"w.weight": torch.zeros(3, 2)})
    (tmp_path / "ad+x").mkdir()
    (tmp_path / "ad+x" / "adapter_config.json").write_text(json.dumps({"r": 1, "lora_alpha": 1}))
    factors = {"w.lora_A.weight": torch.ones(1, 2), "w.lora_B.weight": torch.ones(3, 1)}
    save_file(factors, tmp_path / "ad+x" / "adapter_model.safetensors")
    return tmp_path


def test_names_with_a_plus_open_beside_the_recipe_and_here(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = "c++/base+ad+x"
    located = locate(reference, adapter)
    assert located == f"{adapter}/c++/base+{adapter}/ad+x"
    assert mg.open(located).read("w.weight").sum() == 6
    assert list(paths_in(located)) == [adapter / "c++/base", adapter / "ad+x"]
    (adapter / "recipe.yml").write_text(f"merge_method: linear\nmodels: [{{model: {reference}}}]")
    assert recipes.plan(recipes.load(adapter / "recipe.yml")).models[0].path == located
    monkeypatch.chdir(adapter)
    assert mg.open(reference).read("w.weight").sum() == 6


def test_the_part_that_is_missing_is_named(adapter: Path) -> None:
    with pytest.raises(CheckpointError, match="^absent: no such file or directory"):
        mg.open(f"{adapter}/c++/base+absent")
