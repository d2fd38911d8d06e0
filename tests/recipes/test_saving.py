"""`mg.save`, the one way to disk: whatever is a checkpoint, in the dtype its config says, with a card of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import merganser as mg
from merganser.checkpoints.base import Checkpoint
from merganser.errors import InputError, MerganserError
from merganser.library.library import Library
from merganser.library.masks import MaskLibrary

CONFIG = '{"model_type": "x", "torch_dtype": "float32"}'
Make = Callable[..., Path]


def tensors(seed: int) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    return {"a.weight": torch.randn(16, 12, generator=made), "bias": torch.randn(16, generator=made)}


@pytest.fixture
def views(checkpoint: Make, tmp_path: Path) -> dict[str, Checkpoint]:
    """One checkpoint of every kind that is computed as it is read, over a base whose config names a dtype."""
    base, math, code = (checkpoint(name, tensors(i), CONFIG) for i, name in enumerate(("base", "math", "code")))
    vector = mg.TaskVector(math, base)
    library = Library.build(base, {"math": math, "code": code}, tmp_path / "lib", rank_fraction=0.25)
    masks = MaskLibrary.build(base, {"math": math, "code": code}, tmp_path / "masks")
    return {
        "plain": mg.open(math),
        "applied": mg.open(base) + 0.4 * vector,
        "expert": library.expert("math"),
        "merged": library.merge(scale=0.5),
        "masked": masks.expert("code"),
        "unmasked": masks.merge(0.3),
    }


def test_the_config_says_the_dtype_that_is_written(views: dict[str, Checkpoint], tmp_path: Path) -> None:
    for kind, view in views.items():
        for dtype in (None, "bfloat16"):
            out = mg.save(view, tmp_path / f"{kind}-{dtype}", dtype=dtype)
            written = mg.open(out)
            assert json.loads((out / "config.json").read_text())["torch_dtype"] == (dtype or "float32"), kind
            for name in view.names():
                assert written.spec(name).dtype == getattr(torch, dtype or "float32")
                assert torch.equal(written.read(name), view.read(name).to(written.spec(name).dtype)), (kind, name)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("applied", ["`task_arithmetic`", "Base: ", "0.4·("]),
        ("expert", ["`low-rank expert`", "Base: ", ":math`"]),
        ("merged", ["`tsv`", "Base: ", "- `math`", "- `code`"]),
        ("masked", ["`masked expert`", "Base: ", "- `code`"]),
    ],
)
def test_the_card_is_the_views_own(views: dict[str, Checkpoint], tmp_path: Path, kind: str, says: list[str]) -> None:
    card = (mg.save(views[kind], tmp_path / "out") / "README.md").read_text()
    for text in says:
        assert text in card
    assert "Recipe:" not in card
    assert "passthrough" not in card


def test_the_card_of_a_plain_checkpoint_has_the_recipe(views: dict[str, Checkpoint], tmp_path: Path) -> None:
    card = (mg.save(views["plain"], tmp_path / "out") / "README.md").read_text()
    assert "`passthrough`" in card
    assert "Recipe:" in card


def test_a_task_vector_has_a_card_and_no_config(checkpoint: Make, tmp_path: Path) -> None:
    vector = mg.TaskVector(checkpoint("m", tensors(1), CONFIG), checkpoint("base", tensors(0), CONFIG))
    out = mg.save(-vector.top(0.5), tmp_path / "vector")
    assert "`task vector`" in (out / "README.md").read_text()
    assert not (out / "config.json").exists()
    assert torch.equal(mg.TaskVector.load(out).read("bias"), (-vector.top(0.5)).read("bias"))


def test_a_model_over_an_adapter_that_adds_tokens_says_how_many_it_has(checkpoint: Make, tmp_path: Path) -> None:
    embedding, moved = "model.embed_tokens.weight", torch.ones(3)
    base = checkpoint("base", {embedding: torch.zeros(6, 3), "norm": torch.zeros(3)}, '{"vocab_size": 6}')
    (tmp_path / "lora").mkdir()
    (tmp_path / "lora" / "adapter_config.json").write_text("{}")
    rows = {f"base_model.model.{embedding}": torch.zeros(8, 3)}
    save_file(rows, tmp_path / "lora" / "adapter_model.safetensors")
    out = mg.save(mg.open(f"{base}+{tmp_path}/lora") + mg.TaskVector.load({"norm": moved}), tmp_path / "out")
    assert mg.open(out).spec(embedding).shape == (8, 3)
    assert json.loads((out / "config.json").read_text())["vocab_size"] == 8


def test_a_label_is_no_reference(checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    base, other = checkpoint("base.yml", tensors(0)), checkpoint("other", tensors(1))
    mg.save(other, "view")
    vector = mg.TaskVector(other, base)
    assert vector.label.endswith(".yml")
    assert torch.equal(mg.open(mg.save(vector, "view", overwrite=True)).read("bias"), vector.read("bias"))
    with pytest.raises(InputError, match="cannot be replaced"):
        mg.save(vector, base, overwrite=True)


def test_codes_under_a_task_vector_stay_codes(checkpoint: Make, tmp_path: Path) -> None:
    codes = {"w.weight": torch.ones(2, 2, dtype=torch.int8), "w.scales": torch.full((1, 1), 0.3)}  # of an unknown form
    base = mg.open(checkpoint("codes", {**codes, "norm": torch.ones(4)}))
    moved = base + mg.TaskVector.load({"norm": torch.full((4,), 0.5)})
    written = mg.open(mg.save(moved, tmp_path / "out", dtype="bfloat16"))
    assert written.spec("w.weight").dtype == torch.int8
    assert torch.equal(written.read("w.scales"), codes["w.scales"])
    assert torch.equal(written.read("norm"), torch.full((4,), 1.5, dtype=torch.bfloat16))


def test_a_task_vector_is_added_to_quantised_weights(checkpoint: Make, tmp_path: Path) -> None:
    codes = {"w.weight": torch.ones(2, 2).to(torch.float8_e4m3fn), "w.weight_scale_inv": torch.full((1, 1), 0.25)}
    moved = mg.open(checkpoint("codes", codes)) + mg.TaskVector.load({"w.weight": torch.full((2, 2), 0.5)})
    written = mg.open(mg.save(moved, tmp_path / "out"))
    assert written.names() == ["w.weight"]
    assert torch.equal(written.read("w.weight"), torch.full((2, 2), 0.75, dtype=torch.bfloat16))


def test_values_that_do_not_fit_are_refused_and_nan_is_copied(tmp_path: Path) -> None:
    large = {"w": torch.tensor([1e6, float("nan")])}
    with pytest.raises(MerganserError, match="'w': 1 values do not fit float16"):
        mg.save(large, tmp_path / "half", dtype="float16")
    with pytest.raises(MerganserError, match="'w': 1 values do not fit float16"):
        mg.save(mg.open(large) + mg.TaskVector.load(large), tmp_path / "half", dtype="float16", overwrite=True)
    assert torch.equal(mg.open(mg.save(large, tmp_path / "whole")).read("w").nan_to_num(0), torch.tensor([1e6, 0.0]))


def test_the_work_can_be_bounded_watched_and_resumed(views: dict[str, Checkpoint], tmp_path: Path) -> None:
    seen: list[object] = []
    out = mg.save(views["merged"], tmp_path / "out", workers=1, memory=1 << 20, on_progress=seen.append)
    assert len(seen) == len(views["merged"].names())
    before = (out / "model.safetensors").read_bytes()
    seen.clear()
    assert mg.save(views["merged"], out, resume=True, on_progress=seen.append) == out
    assert not seen
    assert (out / "model.safetensors").read_bytes() == before
    with pytest.raises(InputError, match="workers: expected a whole number"):
        mg.save(views["merged"], tmp_path / "none", workers=0)


def test_checkpoints_have_no_second_way_to_disk() -> None:
    def below(kind: type) -> list[type]:
        return [kind, *(each for sub in kind.__subclasses__() for each in below(sub))]

    assert not [kind for kind in below(Checkpoint) if hasattr(kind, "save")]
