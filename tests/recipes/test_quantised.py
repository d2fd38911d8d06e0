"""Codes with scales beside them: copied together, never combined."""

from __future__ import annotations

import re

import pytest
import torch

from merganser import recipes
from merganser.checkpoints.base import TensorSpec
from merganser.checkpoints.quantised import codes_of, find_codes
from merganser.checkpoints.sidecars import apply_edits
from merganser.engine.plan import Source
from merganser.errors import CheckpointError

LINEAR = "method: linear\nmodels: [a, b]"


def spec(*shape, dtype=torch.float32):
    return TensorSpec(shape, dtype)


def layers(tensors, count=2):
    return {f"model.layers.{i}.{name}": each for i in range(count) for name, each in tensors.items()}


PLAIN = layers({"mlp.up.weight": spec(8, 8)})
FP8 = layers({"mlp.up.weight": spec(8, 8, dtype=torch.float8_e4m3fn), "mlp.up.weight_scale_inv": spec(1, 1)})
#: Codes of a form that nothing here decodes.
UNREAD = layers({"mlp.up.weight": spec(8, 8, dtype=torch.int8), "mlp.up.scales": spec(8)})
SCHEMES = {
    "fp8": FP8,
    "fp8 by tensor": layers({"mlp.up.weight": spec(8, 8, dtype=torch.float8_e4m3fn), "mlp.up.weight_scale": spec()}),
    "mxfp4": layers(
        {
            "experts.up_proj_blocks": spec(4, 8, 2, 16, dtype=torch.uint8),
            "experts.up_proj_scales": spec(4, 8, 2, dtype=torch.uint8),
        }
    ),
    "int8": layers({"mlp.up.weight": spec(8, 8, dtype=torch.int8), "mlp.up.SCB": spec(8)}),
    "nf4": layers({"mlp.up.weight": spec(32, 1, dtype=torch.uint8), "mlp.up.weight.absmax": spec(1)}),
    "gptq": layers({"mlp.up.qweight": spec(1, 8, dtype=torch.int32), "mlp.up.scales": spec(1, 8)}),
    "quanto": layers({"mlp.up.weight._data": spec(8, 8, dtype=torch.int8), "mlp.up.weight._scale": spec(8, 1)}),
    "packed": layers({"mlp.up.weight_packed": spec(8, 1, dtype=torch.int32), "mlp.up.weight_scale": spec(8, 1)}),
}


#: Schemes that only the config tells of.
UNNAMED = {
    "hqq": layers({"mlp.up.W_q": spec(4, 8, dtype=torch.uint8), "mlp.up.scale": spec(8, 1), "mlp.up.zero": spec(8, 1)}),
    "vptq": layers(
        {
            "mlp.up.indices": spec(1, 8, 2, dtype=torch.int16),
            "mlp.up.centroids.weight": spec(1, 64),
            "mlp.up.perm": spec(8, dtype=torch.uint16),
            "mlp.up.weight_scale": spec(8),
        }
    ),
    "aqlm": layers({"mlp.up.codes": spec(8, 1, 1, dtype=torch.int64), "mlp.up.codebooks": spec(1, 16, 1, 8)}),
    "1-d": layers({"mlp.up.words": spec(64, dtype=torch.int32), "mlp.up.range": spec(8)}),
}
BESIDE = {
    "model.embed_tokens.weight": spec(8, 8),
    "model.layers.0.norm.weight": spec(8),
    "model.layers.0.norm.num_batches_tracked": spec(dtype=torch.int64),
    "embeddings.position_ids": spec(1, 8, dtype=torch.int64),
    "attn.relative_position_index": spec(8, 8, dtype=torch.int64),
    "h.attn.bias": spec(1, 1, 8, 8, dtype=torch.uint8),
    "causal_mask": spec(8, 8, dtype=torch.bool),
}


@pytest.mark.parametrize("scheme", UNNAMED)
def test_integers_of_a_quantised_model_are_codes(scheme, header, tmp_path):
    opened = header("a", UNNAMED[scheme] | BESIDE)
    assert find_codes(opened, {"quantization_config": {"quant_method": scheme}}) == set(UNNAMED[scheme])
    assert not find_codes(opened, {"model_type": "llama"}) & set(BESIDE)
    (tmp_path / "config.json").write_text('{"quantization_config": {}}')
    assert codes_of(header("a", UNNAMED[scheme] | BESIDE, directory=tmp_path)) == set(UNNAMED[scheme])
    models = {"a": header("a", UNNAMED[scheme] | BESIDE, directory=tmp_path), "b": header("b", PLAIN)}
    for second in ("a", "b"):
        with pytest.raises(CheckpointError, match="a quantised weight cannot be merged; dequantise the model first"):
            recipes.plan(recipes.load(f"method: linear\nmodels: [a, {second}]\nbase: a"), models.__getitem__)


def planned(text, models, header):
    return recipes.plan(recipes.load(text), lambda reference: header(reference, models[reference]))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_codes_and_their_scales_are_found(scheme, header):
    assert find_codes(header("a", SCHEMES[scheme]), {}) == set(SCHEMES[scheme])


def test_ordinary_tensors_are_not_taken_for_codes(header):
    swin = {
        "layers.0.attn.relative_position_index": spec(4, 4, dtype=torch.int64),
        "layers.0.attn.logit_scale": spec(2, 1, 1),
        "norm.scale": spec(4),
        "layers.0.mlp.weight": spec(4, 4, dtype=torch.float8_e4m3fn),
    }
    assert not find_codes(header("a", swin), {})
    assert find_codes(header("a", swin), {"quantization_config": {}}) == {"layers.0.mlp.weight"}


@pytest.mark.parametrize("other", ["alike", "plain"])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_merge_of_codes_is_refused_in_one_line(scheme, first, other, header):
    codes = dict(reversed(SCHEMES[scheme].items()))  # as in files sorted by dtype, scales come first
    others = codes if other == "alike" else PLAIN
    models = {"a": codes, "b": others} if first else {"a": others, "b": codes}
    with pytest.raises(CheckpointError) as error:
        planned(LINEAR, models, header)
    message = str(error.value)
    assert "a quantised weight cannot be merged; dequantise the model first" in message
    assert "exclude" not in message
    assert re.search(r"'model.layers.[01][\w.]*(weight|weight_packed|blocks|_data)' of [ab] is (float8|u?int)", message)
    assert len(message.splitlines()) == 1
    assert "is missing" not in message


def test_leaving_out_the_scales_does_not_help(header):
    text = "method: task_arithmetic\nbase: a\nmodels: [b]\noutput: {exclude: ['*.SCB']}"
    with pytest.raises(CheckpointError, match=r"'model.layers.0.mlp.up.weight' of b is int8\[8, 8\]"):
        planned(text, {"a": PLAIN, "b": SCHEMES["int8"]}, header)


def test_scales_cannot_be_merged_beside_copied_codes(header):
    text = "method: linear\nmodels: [a, b]\noverrides: [{match: '*.weight', method: passthrough, model: a}]"
    with pytest.raises(CheckpointError, match=r"'model.layers.0.mlp.up.weight_scale_inv' of a"):
        planned(text, {"a": FP8, "b": FP8}, header)


def test_a_scaled_copy_is_arithmetic(header):
    with pytest.raises(CheckpointError, match="a quantised weight cannot be merged"):
        planned("method: passthrough\nmodels: [{path: a, scale: 0.5}]", {"a": FP8}, header)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_copies_keep_codes_dtypes_and_the_config(scheme, header, tmp_path):
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 2, "quantization_config": {"bits": 8}}')
    specs = SCHEMES[scheme] | {"model.norm.weight": spec(8)}
    text = """
method: passthrough
slices: [{path: a, layers: [0, 2]}, {path: b, layers: [1, 2]}]
output: {dtype: bfloat16}
"""
    plan = recipes.plan(recipes.load(text), lambda reference: header(reference, specs, None, tmp_path))
    made = {output.name: output for output in plan.outputs}
    for name, each in SCHEMES[scheme].items():
        if ".1." in name:
            again = made[name.replace(".1.", ".2.")]
            assert (again.inputs, again.spec) == ((Source(1, name),), each)
            assert again.copies
    assert made["model.norm.weight"].spec.dtype is torch.bfloat16
    config = apply_edits({"num_hidden_layers": 2, "quantization_config": {"bits": 8}}, plan.sidecars.config)
    assert config["num_hidden_layers"] == 3
    assert config["quantization_config"] == {"bits": 8}


def test_codes_are_copied_only_under_a_config_that_reads_them(directory, tmp_path):
    directory("a", PLAIN, {"num_hidden_layers": 2})
    directory("b", UNREAD, {"num_hidden_layers": 2, "quantization_config": {"quant_method": "own"}})
    (tmp_path / "recipe.yml").write_text(
        "method: passthrough\nslices: [{path: a, layers: [0, 2]}, {path: b, layers: [1, 2]}]"
    )
    with pytest.raises(
        CheckpointError, match="quantised in a way that the config of the output, .*a.*'s, does not describe"
    ):
        recipes.plan(recipes.load(tmp_path / "recipe.yml"))
    (tmp_path / "recipe.yml").write_text(
        "method: passthrough\nslices: [{path: b, layers: [0, 2]}, {path: a, layers: [1, 2]}]"
    )
    plan = recipes.plan(recipes.load(tmp_path / "recipe.yml"))
    assert any("quantization_config of b is kept, and tensors of a are copied" in note for note in plan.notes)


def test_a_plain_tensor_may_take_the_place_of_codes(header):
    text = """
method: passthrough
base: a
models: [b]
overrides: [{match: "*.0.mlp.up.weight", model: b}, {match: "*", model: base}]
"""
    models = {"a": SCHEMES["int8"], "b": PLAIN}
    made = {output.name: output for output in planned(text, models, header).outputs}
    assert made["model.layers.0.mlp.up.weight"].inputs == (Source(1, "model.layers.0.mlp.up.weight"),)
    assert made["model.layers.0.mlp.up.weight"].spec.dtype is torch.float32


def test_plain_float8_is_merged(header):
    specs = layers({"mlp.up.weight": spec(8, 8, dtype=torch.float8_e4m3fn)})
    plan = planned(LINEAR, {"a": specs, "b": specs}, header)
    assert {output.method for output in plan.outputs} == {"linear"}


def test_an_adapter_over_codes_is_no_copy(directory, tmp_path):
    directory("a", UNREAD)
    factors = {
        "base_model.model.model.layers.0.mlp.up.lora_A.weight": spec(2, 8),
        "base_model.model.model.layers.0.mlp.up.lora_B.weight": spec(8, 2),
    }
    lora = directory("lora", factors, files={"adapter_config.json": {"r": 2, "lora_alpha": 2, "peft_type": "LORA"}})
    (lora / "model.safetensors").rename(lora / "adapter_model.safetensors")
    (tmp_path / "recipe.yml").write_text("method: passthrough\nmodels: [a+lora]")
    with pytest.raises(CheckpointError, match="dequantise"):
        recipes.plan(recipes.load(tmp_path / "recipe.yml"))


def test_tables_of_integers_from_one_of_several_models_are_noted(header):
    integer = {"lookup": spec(4, 4, dtype=torch.int64), "position_ids": spec(1, 4, dtype=torch.int64)}
    models = dict.fromkeys("ab", PLAIN | integer)
    assert planned(LINEAR, models, header).notes == (
        "1 integer tensor(s) are copied from a alone, such as 'lookup' (int64[4, 4])",
    )
    assert not planned("method: passthrough\nmodels: [a]", models, header).notes
