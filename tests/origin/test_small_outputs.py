"""Lock files of what is no directory of a model: single files of weights, and adapters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import merganser as mg
from merganser.errors import CheckpointError, InputError
from merganser.library.adapter_merging import merge_adapters
from merganser.library.lora import extract_lora
from support.locked_models import digests, make_models


@pytest.fixture(autouse=True)
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_models(tmp_path)
    monkeypatch.chdir(tmp_path)


def spoil(file: Path, name: str) -> None:
    """Change a byte of a tensor, and nothing of the header."""
    content = bytearray(file.read_bytes())
    start = 8 + int.from_bytes(content[:8], "little")
    content[start + json.loads(content[8:start])[name]["data_offsets"][0]] ^= 1
    file.write_bytes(content)


RECIPE = {"method": "ties", "base": "base", "models": ["math", "code"]}


class TestSingleFiles:
    def test_its_lock_file_is_beside_it(self) -> None:
        out = mg.run(RECIPE, "out.safetensors")
        assert Path("out.safetensors.lock.json").is_file()
        assert mg.origin.read_lock(out).outputs == {"out.safetensors": digests(out)}
        assert mg.origin.read_lock(out).files == {}
        assert mg.origin.verify(out).problems == ()
        assert mg.origin.rebuild(out).problems == ()
        spoil(out, "norm.weight")
        assert ["'norm.weight' has changed" in each for each in mg.origin.verify(out).problems] == [True]

    def test_it_may_be_renamed_with_its_lock_file(self) -> None:
        out = mg.run(RECIPE, "out.safetensors")
        moved = out.rename("moved.safetensors")
        with pytest.raises(CheckpointError, match=r"has no moved.safetensors.lock.json"):
            mg.origin.verify(moved)
        Path("out.safetensors.lock.json").rename("moved.safetensors.lock.json")
        assert mg.origin.verify(moved).problems == ()

    def test_family_trees_go_through_it(self) -> None:
        mg.run(RECIPE, "inner.safetensors")
        out = mg.run({"method": "linear", "models": ["inner.safetensors", "base"]}, "outer")
        tree = mg.origin.trace(out)
        assert [each.label for each in tree.root.made_of[0].made_of] == ["base", "math", "code"]
        with pytest.raises(InputError, match="only directories are uploaded"):
            mg.origin.push("inner.safetensors", "owner/name", dry_run=True)

    def test_replaced_together(self) -> None:
        out = mg.run(RECIPE, "out.safetensors")
        before = Path("out.safetensors.lock.json").read_bytes()
        mg.run({"method": "linear", "models": ["math", "code"]}, out, overwrite=True)
        assert Path("out.safetensors.lock.json").read_bytes() != before
        assert mg.origin.verify(out).problems == ()


class TestAdapters:
    @pytest.fixture(autouse=True)
    def adapters(self) -> None:
        draw = torch.Generator().manual_seed(0)
        base = load_file("base/model.safetensors")
        for name in ("one", "two"):
            moved = {k: v + torch.randn(v.shape, generator=draw).to(v) for k, v in base.items() if k != "steps"}
            Path(name).mkdir()
            save_file(moved | {"steps": base["steps"]}, f"{name}/model.safetensors")
            extract_lora(name, "base", f"{name}-lora", rank=2)

    def test_extracted(self) -> None:
        lock = mg.origin.read_lock("one-lora")
        assert lock.recipe is None
        assert [each.label for each in lock.models] == ["one", "base"]
        assert [each.licence for each in lock.models] == [None, "mit"]
        assert lock.sources["one/model.safetensors"].items() <= digests(Path("one/model.safetensors")).items()
        assert set(lock.sources["base/model.safetensors"]) >= {"embed.weight", "layers.0.weight"}
        assert set(lock.files) == {"adapter_config.json"}
        assert json.loads(Path("one-lora/merganser.lock.json").read_text())["made_by"]["rank"] == 2
        assert mg.origin.verify("one-lora").problems == ()
        with pytest.raises(InputError, match="has no recipe"):
            mg.origin.rebuild("one-lora")

    def test_merged(self) -> None:
        merge_adapters(["one-lora", "two-lora"], "both", method="ties", density=0.5)
        assert mg.origin.verify("both").problems == ()
        tree = mg.origin.trace("both")
        assert [(each.label, each.kind) for each in tree.root.made_of] == [("one-lora", "merge"), ("two-lora", "merge")]
        assert [each.label for each in tree.root.made_of[0].made_of] == ["one", "base"]
        name = next(iter(load_file("both/adapter_model.safetensors")))
        spoil(Path("both/adapter_model.safetensors"), name)
        assert ["has changed" in each for each in mg.origin.verify("both").problems] == [True]

    def test_the_same_bytes_again(self) -> None:
        extract_lora("one", "base", "again", rank=2)
        assert Path("again/merganser.lock.json").read_bytes() == Path("one-lora/merganser.lock.json").read_bytes()
