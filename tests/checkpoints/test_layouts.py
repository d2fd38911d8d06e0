"""Checkpoints of one architecture in different layouts: merged, and read by transformers."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import merganser as mg
from merganser.checkpoints.layouts import convert_layout, module_tensors
from merganser.checkpoints.skeleton import build_skeleton
from merganser.engine.nested import reopen
from merganser.errors import CheckpointError
from support.llamas import transformers  # noqa: F401

SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT = SMALL | {"vocab_size": 32, "max_position_embeddings": 16, "num_key_value_heads": 2}
TOKENS = torch.arange(1, 13).reshape(2, 6)


def write(model: Any, directory: Path, names: Any = None, config: Any = None) -> Path:
    """Save a model under the names of its modules, or under others."""
    directory.mkdir()
    found = {name: tensor.contiguous().clone() for name, tensor in model.state_dict().items()}
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    kept = {(names(name) if names else name): tensor for name, tensor in found.items() if name not in tied}
    save_file(
        {name: tensor for name, tensor in kept.items() if name}, directory / "model.safetensors", {"format": "pt"}
    )
    (directory / "config.json").write_text(config or model.config.to_json_string(use_diff=False))
    return directory


def models(transformers: Any, kind: str, **settings: Any) -> list[Any]:  # noqa: F811
    cls = getattr(transformers, kind)
    found = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        found.append(cls(cls.config_class(**settings)).eval())
        found[-1].config.architectures = [kind]
    return found


def middle(one: Any, other: Any) -> Any:
    """The average of two models, by their parameters."""
    with torch.no_grad():
        for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
            mine.copy_((mine + theirs) / 2)
    return one


MOES = {
    "mixtral": ("MixtralForCausalLM", TEXT | {"num_local_experts": 11, "num_experts_per_tok": 2}),
    "qwen2_moe": (
        "Qwen2MoeForCausalLM",
        TEXT | {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 1,
                "shared_expert_intermediate_size": 24},
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", MOES)
@pytest.mark.parametrize("fused_first", [True, False])
def test_experts_one_by_one_merge_with_fused_ones(
    kind: str,
    fused_first: bool,
    tmp_path: Path,
    transformers: Any,  # noqa: F811
) -> None:
    one, other = models(transformers, *MOES[kind][:1], **MOES[kind][1])
    one.save_pretrained(tmp_path / "listed")
    write(other, tmp_path / "fused")
    places = [tmp_path / "fused", tmp_path / "listed"] if fused_first else [tmp_path / "listed", tmp_path / "fused"]
    out = mg.run({"method": "linear", "models": [str(each) for each in places]}, tmp_path / "out")
    assert set(mg.open(out).names()) == set(mg.open(places[0]).names())
    written = getattr(transformers, MOES[kind][0]).from_pretrained(out).eval()
    with torch.no_grad():
        torch.testing.assert_close(written(TOKENS).logits, middle(one, other)(TOKENS).logits, atol=1e-5, rtol=1e-4)


def test_rows_of_another_layout_are_read_alone(tmp_path: Path, transformers: Any) -> None:  # noqa: F811
    one, _ = models(transformers, *MOES["mixtral"][:1], **MOES["mixtral"][1])
    one.save_pretrained(tmp_path / "listed")
    listed, fused = mg.open(tmp_path / "listed"), mg.open(write(one, tmp_path / "fused"))
    for template, stored in ((listed, fused), (fused, listed)):
        seen = convert_layout(template, stored)
        for name in template.names():
            assert seen.spec(name) == template.spec(name)
            assert torch.equal(seen.read(name, (1, 3)), template.read(name, (1, 3))), name
    assert convert_layout(fused, fused) is fused


def test_a_plan_keeps_the_layout(tmp_path: Path, transformers: Any) -> None:  # noqa: F811
    one, other = models(transformers, *MOES["mixtral"][:1], **MOES["mixtral"][1])
    one.save_pretrained(tmp_path / "listed")
    write(other, tmp_path / "fused")
    recipe = {"method": "linear", "models": [str(tmp_path / "listed"), str(tmp_path / "fused")]}
    plan = mg.recipes.prepare(mg.recipes.load(recipe)).plan
    assert any("another layout" in note for note in plan.notes)
    again = reopen(pickle.loads(pickle.dumps(plan)))
    assert set(again.sources[1].names()) == set(again.sources[0].names())


def test_bare_and_headed_models_merge(tmp_path: Path, transformers: Any) -> None:  # noqa: F811
    bert = SMALL | {"vocab_size": 32, "max_position_embeddings": 16}
    one, other = models(transformers, "BertModel", **bert)
    one.save_pretrained(tmp_path / "bare")
    headed = transformers.BertForMaskedLM(other.config)
    headed.bert.load_state_dict(other.state_dict(), strict=False)
    headed.save_pretrained(tmp_path / "headed")
    recipe = {"method": "linear", "models": [str(tmp_path / "bare"), str(tmp_path / "headed")]}
    with pytest.raises(CheckpointError, match=r"'cls\.predictions"):
        mg.recipes.prepare(mg.recipes.load(recipe))
    out = mg.run(recipe | {"output": {"exclude": ["cls.*", "bert.*", "pooler.*"]}}, tmp_path / "out")
    name = "encoder.layer.1.output.dense.weight"
    halfway = (one.state_dict()[name] + other.state_dict()[name]) / 2
    assert torch.allclose(mg.open(out).read(name), halfway, atol=1e-6)


def test_old_and_new_names_of_a_vision_language_model_merge(tmp_path: Path, transformers: Any) -> None:  # noqa: F811
    text = {"model_type": "llama"} | TEXT
    vision = {"model_type": "clip_vision_model", "image_size": 8, "patch_size": 4, "projection_dim": 8} | SMALL
    one, other = models(
        transformers, "LlavaForConditionalGeneration", text_config=text, vision_config=vision, image_token_index=3,
        image_seq_length=4,
    )  # fmt: skip

    def old(name: str) -> str:
        name = name.replace("model.language_model.", "language_model.model.").replace(
            "lm_head", "language_model.lm_head"
        )
        return name.removeprefix("model.")

    new = write(one, tmp_path / "new")
    out = mg.run({"method": "linear", "models": [str(new), str(write(other, tmp_path / "old", old))]}, tmp_path / "out")
    assert set(load_file(out / "model.safetensors")) == set(load_file(new / "model.safetensors"))
    written = transformers.LlavaForConditionalGeneration.from_pretrained(out).eval()
    with torch.no_grad():
        torch.testing.assert_close(
            written(input_ids=TOKENS[:, 3:]).logits, middle(one, other)(input_ids=TOKENS[:, 3:]).logits,
            atol=1e-5, rtol=1e-4,
        )  # fmt: skip


def test_experts_that_are_missing_are_named(tmp_path: Path, transformers: Any) -> None:  # noqa: F811
    one, other = models(transformers, *MOES["mixtral"][:1], **MOES["mixtral"][1])
    one.save_pretrained(tmp_path / "listed")
    write(other, tmp_path / "fused")
    file = tmp_path / "listed" / "model.safetensors"
    kept = {name: tensor for name, tensor in load_file(file).items() if "experts.4.w2" not in name}
    save_file(kept, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"down_proj' would be \[10, 16, 24\], assembled from 10 tensors"):
        mg.run({"method": "linear", "models": [str(tmp_path / "fused"), str(tmp_path / "listed")]}, tmp_path / "out")


def test_models_of_another_kind_keep_their_names(tmp_path: Path, transformers: Any) -> None:  # noqa: F811
    llama, _ = models(transformers, "LlamaForCausalLM", **TEXT)
    mixtral, _ = models(transformers, *MOES["mixtral"][:1], **MOES["mixtral"][1])
    one, other = mg.open(write(llama, tmp_path / "llama")), mg.open(write(mixtral, tmp_path / "mixtral"))
    assert convert_layout(one, other) is other
    skeleton = build_skeleton(one)
    assert skeleton is not None
    assert {parameter.device.type for parameter in skeleton.parameters()} == {"meta"}
    assert set(module_tensors(one, skeleton)) == set(one.names())
    (tmp_path / "llama" / "config.json").write_text('{"model_type": "unheard-of"}')
    assert build_skeleton(one) is None


def test_a_language_model_merges_into_the_language_part_of_a_vision_language_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    text = {"layers.0.w": torch.randn(4, 4), "norm": torch.randn(4)}
    whole = {f"model.language_model.{name}": tensor for name, tensor in text.items()}
    whole |= {"model.vision.w": torch.randn(3, 3), "lm_head.weight": torch.randn(6, 4)}
    tuned = {f"model.{name}": tensor + 1 for name, tensor in text.items()} | {"lm_head.weight": whole["lm_head.weight"]}
    save_file(whole, tmp_path / "vlm.safetensors")
    save_file(tuned, tmp_path / "llm.safetensors")
    vlm, llm = (str(tmp_path / f"{name}.safetensors") for name in ("vlm", "llm"))

    def recipe(prefixes: Any) -> dict[str, Any]:
        models = [{"path": llm, "map": prefixes}]
        return {"method": "task_arithmetic", "base": vlm, "models": models, "parameters": {"weight": 0.5}}

    prepared = mg.recipes.prepare(mg.recipes.load(recipe({"model.": "model.language_model."})))
    for merge in (prepared, reopen(pickle.loads(pickle.dumps(prepared.plan)))):
        seen = merge.sources[1]
        assert torch.equal(seen.read("model.vision.w"), whole["model.vision.w"])
        assert torch.equal(seen.read("model.language_model.norm", (1, 3)), tuned["model.norm"][1:3])
    out = mg.open(mg.run(recipe({"model.": "model.language_model."}), tmp_path / "out"))
    for name, tensor in whole.items():
        assert torch.allclose(out.read(name), tensor + 0.5 * ("language_model" in name), atol=1e-6), name
    for prefixes, message in (
        ({"modle.": "model.language_model."}, "no tensor's name begins with 'modle.'"),
        ({"model.": "text."}, "no tensor's name begins with 'text.'"),
        ({"model.": 3}, r"map\['model\.'\]"),
        ({}, "write `map: |does not have"),
    ):
        with pytest.raises(mg.errors.InputError, match=message):
            mg.run(recipe(prefixes), tmp_path / "none")
