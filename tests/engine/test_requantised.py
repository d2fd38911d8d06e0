"""Merges that are quantised as they are written: read back by our readers, and by the gguf library."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import merganser as mg
from merganser.engine.ggml import load_ggml
from merganser.engine.requantised import Requantised
from merganser.errors import InputError, MerganserError, MissingExtraError
from support.small_gguf import CONFIG, LAYERS, llama, write


def directory(place: Path, seed: int = 0, **config) -> Path:
    place.mkdir()
    random = np.random.default_rng(seed)
    weights = {
        n: torch.from_numpy(v + 0.1 * random.normal(size=v.shape).astype(np.float32)) for n, v in llama().items()
    }
    save_file({name: each.bfloat16() for name, each in weights.items()}, place / "model.safetensors")
    (place / "config.json").write_text(json.dumps({**CONFIG, **config}))
    return place


@pytest.fixture
def recipe(tmp_path: Path) -> dict[str, object]:
    pytest.importorskip("transformers", reason="it knows which weights are Linear")
    return {"method": "linear", "models": [str(directory(tmp_path / "a", 1)), str(directory(tmp_path / "b", 2))]}


def test_fp8_is_as_near_as_its_rounding(recipe, tmp_path):
    plain = mg.open(mg.run(recipe, tmp_path / "plain"))
    out = mg.run({**recipe, "output": {"quantize": "fp8"}}, tmp_path / "out", processes=True)
    stored = load_file(out / "model.safetensors")
    settings = json.loads((out / "config.json").read_text())["quantization_config"]
    assert settings["quant_method"] == "compressed-tensors"
    assert settings["ignore"] == ["lm_head"]
    coded = [name for name, each in stored.items() if each.dtype is torch.float8_e4m3fn]
    assert len(coded) == 7 * LAYERS
    back = mg.open(out)
    for name in plain.names():
        assert back.spec(name) == plain.spec(name)
        if name not in coded:
            assert torch.equal(back[name], plain[name])
            continue
        exact = sum(load_file(tmp_path / each / "model.safetensors")[name].float() for each in "ab") / 2
        scale = exact.abs().amax(1, keepdim=True) / 448
        assert torch.equal(stored[f"{name}_scale"], scale)
        assert torch.equal(stored[name].float(), (exact / scale).to(torch.float8_e4m3fn).float())
        assert (back[name] - exact).norm() / exact.norm() < 0.03


def test_the_error_of_each_layer_stands_beside_that_of_the_first_model(recipe, tmp_path):
    merges = []
    out = mg.run(recipe, tmp_path / "out", quantize="fp8", on_merge=merges.append)
    view = merges[0].sources[0]
    assert isinstance(view, Requantised)
    errors = {error.layer: error for error in view.errors()}
    assert list(errors) == ["0", "1"]
    back, first = mg.open(out), load_file(tmp_path / "a" / "model.safetensors")
    other = load_file(tmp_path / "b" / "model.safetensors")
    names = [name for name in back.names() if name.startswith("model.layers.1.") and first[name].dim() == 2]
    exact = {name: (first[name].float() + other[name].float()) / 2 for name in names}
    wrong = sum(float((back[name] - exact[name]).square().sum()) for name in names)
    norm = sum(float(exact[name].square().sum()) for name in names)
    assert errors["1"].merged == pytest.approx((wrong / norm) ** 0.5, rel=1e-4)
    assert errors["1"].alone == pytest.approx(errors["1"].merged, rel=0.2)


def test_an_interrupted_merge_gives_the_same_bytes(recipe, tmp_path):
    whole = mg.run(recipe, tmp_path / "whole", quantize="fp8")

    calls = []

    def stop(progress):
        calls.append(progress)
        if len(calls) == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        mg.run(recipe, tmp_path / "out", quantize="fp8", workers=1, on_progress=stop)
    out = mg.run(recipe, tmp_path / "out", quantize="fp8", resume=True)
    assert (out / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


@pytest.mark.parametrize("form", ["q8_0", "q4_0"])
def test_gguf(form, tmp_path):
    gguf = pytest.importorskip("gguf")
    directory(tmp_path / "a", 1)
    path = write(tmp_path / "m.gguf", llama())
    document = {"method": "linear", "models": [str(tmp_path / "a"), str(path)], "output": {"quantize": form}}
    out = mg.run(document, tmp_path / "out.gguf")
    assert out.is_file()
    back, reader = mg.open(out), gguf.GGUFReader(str(out))
    assert {t.name for t in reader.tensors} == {t.name for t in gguf.GGUFReader(str(path)).tensors}
    assert reader.fields["general.file_type"].contents() == {"q8_0": 7, "q4_0": 2}[form]
    assert reader.fields["tokenizer.ggml.tokens"].contents() == ["a", "b"]
    mine, limit = load_file(tmp_path / "a" / "model.safetensors"), {"q8_0": 0.006, "q4_0": 0.1}[form]
    for name, values in llama().items():
        exact = (mine[name].float() + torch.from_numpy(values)) / 2
        assert (back[name] - exact).norm() <= limit * exact.norm(), name
        if exact.dim() == 1:
            torch.testing.assert_close(back[name], exact)
        else:
            stored = next(t for t in reader.tensors if t.name == back.place(name).tensor)
            assert stored.tensor_type.name == form.upper()
    again = []
    mg.run(document, out, resume=True, on_complete=again.append)
    assert again == [out]


def test_transformers_reads_a_gguf_that_was_written(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("gguf")
    path = write(tmp_path / "m.gguf", llama())
    out = mg.run({"method": "passthrough", "models": [str(path)], "output": {"quantize": "q8_0"}}, tmp_path / "o.gguf")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=out.name, dtype=torch.float32)
    for name, values in model.state_dict().items():
        assert (values - torch.from_numpy(llama()[name])).norm() < 0.01 * values.norm()


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        ("q4_k_m", "q4_k_m is a mixture of types that llama.cpp chooses; use q4_k for one type, or write q8_0 and run"),
        ("fp9", "unknown format 'fp9'.*did you mean 'fp8'"),
        ("q8_0", "a known architecture to the models"),
    ],
)
def test_forms_that_cannot_be_written_are_refused(form, reason, recipe, tmp_path):
    with pytest.raises(MerganserError, match=reason):
        mg.run(recipe, tmp_path / "out", quantize=form)
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_quantised_is_refused_before_work(recipe, tmp_path):
    with pytest.raises(InputError, match="out.gguf: the weights are written as safetensors; .* set output.quantize"):
        mg.run(recipe, tmp_path / "out.gguf")
    mg.save({"w": torch.ones(2, 2)}, tmp_path / "bare")
    with pytest.raises(InputError, match="which weights are Linear"):
        mg.run({"method": "passthrough", "models": [str(tmp_path / "bare")]}, tmp_path / "out", quantize="fp8")
    nested = {"method": "passthrough", "models": [{"recipe": {**recipe, "output": {"quantize": "fp8"}}}]}
    with pytest.raises(InputError, match="only the outermost recipe"):
        mg.run(nested, tmp_path / "out")


@pytest.mark.parametrize(
    ("form", "limit", "narrow"), [("q6_k", 0.025, "Q8_0"), ("q5_k", 0.05, "Q5_1"), ("q4_k", 0.1, "Q5_0")]
)
def test_k_quants(form, limit, narrow, tmp_path):
    """Rows of 256 entries in K-quants, others in the type that llama.cpp uses instead; decoded by gguf."""
    gguf = pytest.importorskip("gguf")
    try:
        load_ggml()
    except MissingExtraError as error:
        pytest.skip(str(error))
    random = np.random.default_rng(1)
    weights = {
        name: random.normal(size=(*values.shape[:-1], 256)).astype(np.float32) if "up_proj" in name else values
        for name, values in llama().items()
    }
    path = write(tmp_path / "m.gguf", weights)
    out = mg.run({"method": "passthrough", "models": [str(path)]}, tmp_path / "out.gguf", quantize=form)
    stored = {t.name: t for t in gguf.GGUFReader(str(out)).tensors}
    assert stored["blk.0.ffn_up.weight"].tensor_type.name == form.upper()
    assert stored["blk.0.attn_q.weight"].tensor_type.name == narrow
    for name, values in weights.items():
        tensor = stored[mg.open(out).place(name).tensor]
        found = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if "up_proj" in name or values.ndim == 1:
            assert np.linalg.norm(found - values) <= limit * np.linalg.norm(values), name


def test_k_quants_need_a_package(monkeypatch, tmp_path):
    pytest.importorskip("gguf")
    for package in ("xllamacpp", "llama_cpp"):
        monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    load_ggml.cache_clear()
    path = write(tmp_path / "m.gguf", llama())
    with pytest.raises(MissingExtraError, match=r"'xllamacpp'.*'merganser\[llama-cpp\]', or write q8_0"):
        mg.run({"method": "passthrough", "models": [str(path)]}, tmp_path / "out.gguf", quantize="q4_k")
    load_ggml.cache_clear()
