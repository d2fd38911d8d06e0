"""Adapters merged to an adapter: against naive matrices, and in PEFT."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import merganser as mg
from merganser.errors import CheckpointError, InputError
from merganser.library import extract_lora, merge_adapters
from support.llamas import transformers  # noqa: F401

peft = pytest.importorskip("peft")
SHAPES = {"q": (24, 16), "up": (16, 40)}


def adapter(
    path: Path, ranks: dict[str, int], seed: int, whole: dict[str, torch.Tensor] | None = None, **more: Any
) -> Path:
    rng = torch.Generator().manual_seed(seed)
    path.mkdir()
    tensors = {}
    for name, rank in ranks.items():
        rows, columns = SHAPES[name]
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(rank, columns, generator=rng)
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(rows, rank, generator=rng)
    tensors |= {f"base_model.model.{name}": tensor for name, tensor in (whole or {}).items()}
    save_file(tensors, path / "adapter_model.safetensors")
    config = {"r": 2, "lora_alpha": 6, "rank_pattern": ranks, "modules_to_save": [n.split(".")[0] for n in whole or ()]}
    (path / "adapter_config.json").write_text(json.dumps(config | more))
    return path


def delta(path: Path, name: str) -> np.ndarray[Any, Any]:
    tensors, config = (
        load_file(path / "adapter_model.safetensors"),
        json.loads((path / "adapter_config.json").read_text()),
    )
    if f"base_model.model.{name}.lora_A.weight" not in tensors:
        return np.zeros(SHAPES[name])
    a, b = (tensors[f"base_model.model.{name}.lora_{x}.weight"].double().numpy() for x in "AB")
    return b @ a * (config["lora_alpha"] / a.shape[0])


@pytest.fixture
def two(tmp_path: Path) -> list[Path]:
    """Adapters of different ranks that share one of their two modules."""
    return [adapter(tmp_path / "a", {"q": 3, "up": 2}, 0), adapter(tmp_path / "b", {"q": 2}, 1)]


@pytest.mark.parametrize("space", ["concat", "full", "core_space", "knots"])
def test_a_weighted_sum_is_exact_over_the_union_of_modules(two: list[Path], tmp_path: Path, space: Any) -> None:
    method = {} if space == "concat" else {"method": "task_arithmetic"}
    report = merge_adapters(
        two, tmp_path / "out", space=space, weights=[0.7, -0.4], scale=2.0, dtype="float32", **method
    )
    assert report.energy == pytest.approx(1)
    assert report.modules == 2
    for name in SHAPES:
        expected = 2 * (0.7 * delta(two[0], name) - 0.4 * delta(two[1], name))
        np.testing.assert_allclose(delta(tmp_path / "out", name), expected, atol=1e-4)


def test_ties_on_whole_updates_is_ties_on_matrices(two: list[Path], tmp_path: Path) -> None:
    merge_adapters(two, tmp_path / "out", space="full", method="ties", density=0.3, rank=16, dtype="float32")
    updates = [delta(path, "q") for path in two]
    kept = []
    for each in updates:
        floor = np.sort(np.abs(each).ravel())[::-1][round(0.3 * each.size) - 1]
        kept.append(np.where(np.abs(each) >= floor, each, 0))
    sign = np.sign(sum(kept))
    agree = [np.where(np.sign(each) == sign, each, 0) for each in kept]
    expected = sum(agree) / np.maximum(sum(each != 0 for each in agree), 1)
    found = delta(tmp_path / "out", "q")
    reference = mg.merge(
        [{"q": torch.from_numpy(each).float()} for each in updates], base={"q": torch.zeros(24, 16)}, method="ties",
        density=0.3,
    )  # fmt: skip
    np.testing.assert_allclose(found, reference["q"], atol=1e-4)
    np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize("method", ["dare_linear", "dare_ties", "breadcrumbs", "magmax", "tsv", "knots", "core_space"])
def test_rules_for_task_vectors_take_adapters(two: list[Path], tmp_path: Path, method: str) -> None:
    report = merge_adapters(two, tmp_path / "out", space="full", method=method, rank=4, seed=3)
    again = merge_adapters(two, tmp_path / "again", space="full", method=method, rank=4, seed=3)
    assert (report.rank, report.energy) == (again.rank, again.energy)
    assert 0 < report.energy <= 1
    reference = mg.merge(
        [{"q": torch.from_numpy(delta(path, "q")).float()} for path in two], base={"q": torch.zeros(24, 16)},
        method=method,
    )["q"].double()  # fmt: skip
    if "dare" not in method:  # whose draws depend on names
        u, s, vt = np.linalg.svd(reference.numpy())
        np.testing.assert_allclose(delta(tmp_path / "out", "q"), (u[:, :4] * s[:4]) @ vt[:4], atol=0.05 * s[0])


def test_a_model_is_no_adapter(tmp_path):
    first = adapter(tmp_path / "a", {"q": 2}, 0)
    (tmp_path / "model").mkdir()
    with pytest.raises(CheckpointError, match=r"model: not an adapter: it has no adapter_config\.json$"):
        merge_adapters([first, tmp_path / "model"], tmp_path / "out")


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        ("opcm", {}, "set scope to 'tensor'"),
        ("ties", {"scope": "global"}, "set scope to 'tensor'"),
        ("tsv", {"norms": "equal"}, "set norms to 'keep'"),
        ("esm", {}, "needs gram statistics"),
    ],
)
def test_rules_that_need_more_than_a_tensor_are_refused(
    two: list[Path], tmp_path: Path, method: str, settings: dict[str, str], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        merge_adapters(two, tmp_path / "out", space="full", method=method, **settings)
    assert not (tmp_path / "out").exists()
    merge_adapters(two, tmp_path / "out", space="full", method="opcm", scope="tensor")


def test_a_cut_keeps_the_energy_it_says(two: list[Path], tmp_path: Path) -> None:
    report = merge_adapters(two, tmp_path / "out", space="concat", rank=2, dtype="float32")
    whole = sum(delta(path, "q") for path in two), delta(two[0], "up")
    kept = sum(float(np.square(delta(tmp_path / "out", name)).sum()) for name in SHAPES)
    assert report.energy == pytest.approx(kept / sum(float(np.square(each).sum()) for each in whole), rel=1e-5)


def test_modules_saved_whole_are_merged_as_weights(tmp_path: Path) -> None:
    heads = [torch.randn(4, 3) for _ in range(2)]
    one = adapter(tmp_path / "a", {"q": 2}, 0, {"head.weight": heads[0]})
    other = adapter(tmp_path / "b", {"q": 2}, 1, {"head.weight": heads[1]})
    report = merge_adapters([one, other], tmp_path / "out", space="concat", weights=[3, 1])
    found = load_file(tmp_path / "out/adapter_model.safetensors")["base_model.model.head.weight"]
    assert torch.allclose(found, 0.75 * heads[0] + 0.25 * heads[1])
    assert json.loads((tmp_path / "out/adapter_config.json").read_text())["modules_to_save"] == ["head"]
    assert "averaged by their weights" in report.notes[0]
    plain = adapter(tmp_path / "c", {"q": 2}, 2)
    with pytest.raises(CheckpointError, match=r"a saves 'head\.weight' whole, .*c does not; give the base"):
        merge_adapters([one, plain], tmp_path / "none")
    base = {"head.weight": torch.randn(4, 3), "q.weight": torch.zeros(24, 16)}
    merge_adapters([one, plain], tmp_path / "with", method="task_arithmetic", base=base)
    found = load_file(tmp_path / "with/adapter_model.safetensors")["base_model.model.head.weight"]
    assert torch.allclose(found, heads[0], atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weights": [1.0]}, "1 weights are given for 2 adapters"),
        ({"space": "concat", "density": 0.5}, "concat has no parameter 'density'"),
        ({"method": "slerp", "weights": [1, 2]}, "method 'slerp' has no weights"),
        ({"method": "tiez"}, "did you mean 'ties'"),
    ],
)
def test_settings_that_do_not_fit(two: list[Path], tmp_path: Path, settings: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        merge_adapters(two, tmp_path / "out", **settings)
    assert not (tmp_path / "out").exists()


def test_adapters_that_are_no_low_rank_updates_are_named(two: list[Path], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is a VERA adapter, so it is not a set of low-rank updates"):
        merge_adapters([adapter(tmp_path / "v", {"q": 2}, 2, peft_type="VERA"), *two], tmp_path / "out")
    turned = adapter(tmp_path / "t", {"q": 2}, 2, fan_in_fan_out=True)
    with pytest.raises(CheckpointError, match="change 'q.weight' differently: linear .* and turned"):
        merge_adapters([two[0], turned], tmp_path / "out")


@pytest.mark.parametrize("policy", [{"energy": 0.9}, {"budget": 9000}])
def test_ranks_by_layer_load_in_peft(policy: Any, tmp_path: Path, transformers: Any) -> None:  # noqa: F811
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "base")
    torch.manual_seed(0)
    with torch.no_grad():
        for place, parameter in enumerate(model.parameters()):
            if parameter.dim() == 2:
                rank = 1 + place % 4
                parameter += 0.1 * torch.randn(parameter.shape[0], rank) @ torch.randn(rank, parameter.shape[1])
    model.save_pretrained(tmp_path / "tuned")
    report = extract_lora(
        tmp_path / "tuned", tmp_path / "base", tmp_path / "out", dtype="float32", exclude=["*norm*"], **policy
    )
    stored = load_file(tmp_path / "out/adapter_model.safetensors")
    ranks = {tensor.shape[0] for name, tensor in stored.items() if "_A" in name}
    assert len(ranks) > 1
    if "energy" in policy:
        assert report.energy >= 0.9
    else:
        assert sum(tensor.nbytes for tensor in stored.values()) <= 9000
    base = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "base")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*missing adapter keys.*")
        served = peft.PeftModel.from_pretrained(base, tmp_path / "out").merge_and_unload()
    adapted = mg.open(f"{tmp_path / 'base'}+{tmp_path / 'out'}")
    for name, tensor in served.state_dict().items():
        torch.testing.assert_close(adapted.read(name).float(), tensor, atol=1e-5, rtol=1e-4)
    only = extract_lora(tmp_path / "tuned", tmp_path / "base", tmp_path / "mlp", rank=4, include=["*.mlp.*"])
    assert only.modules == 6
    assert "lm_head.weight" in only.left_out
    with pytest.raises(InputError, match="choose one of rank, energy"):
        extract_lora(tmp_path / "tuned", tmp_path / "base", tmp_path / "x", rank=4, energy=0.9)
