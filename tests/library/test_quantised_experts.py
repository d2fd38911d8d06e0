"""Codes have no differences: nothing that is made of differences takes them for numbers."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

import merganser as mg
from merganser.errors import CheckpointError

PLAIN = {"mlp.up.weight": torch.ones(8, 8), "norm.weight": torch.ones(8)}
CODES = {
    "fp8": {"mlp.up.weight": torch.ones(8, 8).to(torch.float8_e4m3fn), "mlp.up.weight_scale_inv": torch.ones(1, 1)},
    "int8": {"mlp.up.weight": torch.ones(8, 8, dtype=torch.int8), "mlp.up.SCB": torch.ones(8)},
    "nf4": {"mlp.up.weight": torch.ones(32, 1, dtype=torch.uint8), "mlp.up.weight.absmax": torch.ones(1)},
    "gptq": {"mlp.up.qweight": torch.ones(1, 8, dtype=torch.int32), "mlp.up.scales": torch.ones(1, 8)},
}
USES = {
    "task vector": lambda tuned, base, out: mg.TaskVector(tuned, base),
    "library": lambda tuned, base, out: mg.library.Library.build(base, {"a": tuned}, out),
    "masks": lambda tuned, base, out: mg.library.MaskLibrary.build(base, {"a": tuned}, out),
    "adapter": lambda tuned, base, out: mg.library.extract_lora(tuned, base, out, rank=2),
    "stored vector": lambda tuned, base, out: [mg.TaskVector.load(each) for each in (tuned, base)],
    "similarity": lambda tuned, base, out: mg.analysis.similarity.weight_similarity({"a": tuned, "b": base}),
    "interference": lambda tuned, base, out: mg.interference.survey(base, {"a": tuned, "b": tuned}),
}


@pytest.mark.parametrize("scheme", CODES)
@pytest.mark.parametrize("use", USES)
def test_differences_of_codes_are_refused(scheme, use, tmp_path):
    codes = {"norm.weight": torch.ones(8)} | CODES[scheme]
    for tuned, base in ((codes, codes), (codes, PLAIN), (PLAIN, codes)):
        with pytest.raises(
            CheckpointError, match=r"one of 2 tensors of codes and scales: .* dequantise the model first"
        ):
            USES[use](tuned, base, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("scheme", ["fp8", "int8"])
def test_codes_are_not_moved_and_what_is_beside_them_is(scheme):
    codes = {"norm.weight": torch.ones(8)} | CODES[scheme]
    vector = mg.TaskVector({name: tensor + 1 for name, tensor in PLAIN.items()}, PLAIN)
    with pytest.raises(CheckpointError, match="changes 'mlp.up.weight', .* codes of a quantised model"):
        vector.apply_to(codes)
    moved = mg.TaskVector({"norm.weight": torch.full((8,), 3.0)}, {"norm.weight": torch.ones(8)}).apply_to(codes)
    assert torch.equal(moved.read("norm.weight"), torch.full((8,), 3.0))
    assert moved.read("mlp.up.weight").dtype == codes["mlp.up.weight"].dtype


@pytest.mark.parametrize(
    "own",
    [
        {"attn.mask_weight": torch.ones(4, 4, dtype=torch.bool)},
        {"class_weight": torch.ones(2, 2, dtype=torch.int64)},
        {"mlp.up.scales": torch.ones(3), "mlp.up.index": torch.zeros(2, 2, dtype=torch.int64)},
    ],
)
def test_masks_and_indices_are_no_codes(own):
    assert "mlp.up.weight" in mg.TaskVector(PLAIN | own, PLAIN | own).names()


def test_a_config_that_decides_nothing_is_not_read(tmp_path):
    save_file(PLAIN, tmp_path / "a.safetensors")
    (tmp_path / "config.json").write_text("[1]")
    assert len(mg.TaskVector(tmp_path / "a.safetensors", PLAIN).names()) == 2


def test_codes_that_are_left_out_do_no_harm():
    codes = {"norm.weight": torch.ones(8)} | CODES["fp8"]
    assert list(mg.TaskVector(codes, codes, exclude=["mlp.*"]).names()) == ["norm.weight"]


def test_float8_is_codes_only_where_the_config_says_so(tmp_path):
    save_file({"up.weight": torch.ones(4, 4).to(torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    assert list(mg.TaskVector(tmp_path, tmp_path).names()) == ["up.weight"]
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(CheckpointError, match="'up.weight' is"):
        mg.TaskVector(tmp_path, tmp_path)
