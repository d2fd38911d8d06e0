from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from typer.testing import CliRunner

import merganser as mg
from merganser import cli
from merganser.checkpoints.adapter_file import AdapterFile
from merganser.checkpoints.adapter_proof import prove
from merganser.errors import CheckpointError, MerganserError

peft = pytest.importorskip("peft")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.inner = nn.Linear(8, 6)
        self.conv = nn.Conv2d(3, 4, 3)
        self.head = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(self.embed(x)))


def adapted(tmp_path: Path, **options: object) -> tuple[Path, Path, dict[str, torch.Tensor]]:
    """A base, a random adapter over it, and peft's own merge of the two."""
    torch.manual_seed(0)
    net = Net()
    base = tmp_path / "base"
    base.mkdir()
    save_file(net.state_dict(), base / "model.safetensors")
    config = peft.LoraConfig(target_modules=["inner", "embed", "conv"], modules_to_save=["head"], r=2, **options)
    model = peft.get_peft_model(net, config)
    for name, parameter in model.named_parameters():
        if "lora" in name or "modules_to_save" in name:
            nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(tmp_path / "adapter")
    merged = model.merge_and_unload().state_dict()
    return base, tmp_path / "adapter", merged


@pytest.mark.parametrize("options", [{}, {"use_rslora": True}, {"lora_alpha": 5}, {"alpha_pattern": {"inner": 3}}])
def test_equals_peft(tmp_path: Path, options: dict[str, object]) -> None:
    base, adapter, expected = adapted(tmp_path, **options)
    opened = mg.open(f"{base}+{adapter}")
    assert set(opened.names()) == set(expected)
    for name, tensor in expected.items():
        assert torch.allclose(opened.read(name), tensor, atol=1e-6), name
        assert torch.allclose(opened.read(name, (1, 2)), tensor[1:2], atol=1e-6), name


def test_rank_patterns(tmp_path: Path) -> None:
    base, adapter, expected = adapted(tmp_path, rank_pattern={"inner": 4})
    assert torch.allclose(mg.open(f"{base}+{adapter}").read("inner.weight"), expected["inner.weight"], atol=1e-6)


LLAMA = "model.layers.{}.self_attn.{}_proj"
PATTERNS = [
    r".*layers\.1\..*q_proj",
    r"layers\.[01]\.self_attn\.q_proj",
    "proj",
    "q_proj",
    r".*\.q_proj",
    "layers.1.self_attn.q_proj",
    "^model.layers.0.self_attn.q_proj",
    "(q|v)_proj",
    ".*",
]


def llama_adapter(directory: Path, **settings: object) -> AdapterFile:
    """Rank 2 for the query projections and 8 for the others, in two layers."""
    directory.mkdir()
    tensors: dict[str, torch.Tensor] = {}
    for layer in (0, 1):
        for letter, rank in (("q", 2), ("v", 8)):
            name = f"base_model.model.{LLAMA.format(layer, letter)}"
            tensors |= {f"{name}.lora_A.weight": torch.ones(rank, 3), f"{name}.lora_B.weight": torch.ones(3, rank)}
    save_file(tensors, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps({"r": 8, "lora_alpha": 4} | settings))
    return AdapterFile(directory)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_match_as_in_peft(tmp_path: Path, pattern: str) -> None:
    adapter = llama_adapter(tmp_path / "a", rank_pattern={r".*\.q_proj": 2}, alpha_pattern={pattern: 32})
    for name, update in adapter.updates.items():
        module = name.removesuffix(".weight")
        alpha = 32 if peft.utils.other.get_pattern_key([pattern], module) == pattern else 4
        assert update.scale == alpha / (2 if "q_proj" in module else 8), module


def test_patterns_that_take_python_years_are_matched_at_once(tmp_path: Path) -> None:
    pattern = "(([a-z0-9._]+)+)+!"
    adapter = llama_adapter(tmp_path / "a", rank_pattern={r".*\.q_proj": 2}, alpha_pattern={pattern: 32})
    assert {update.scale for update in adapter.updates.values()} == {4 / 2, 4 / 8}


def test_the_first_pattern_that_matches_counts(tmp_path: Path) -> None:
    adapter = llama_adapter(tmp_path / "a", rank_pattern={"q_proj": 2, ".*": 8}, alpha_pattern={"proj": 7, ".*": 16})
    assert {update.scale for update in adapter.updates.values()} == {16 / 2, 16 / 8}


def test_defaults_are_those_of_peft(tmp_path: Path) -> None:
    base, adapter, expected = adapted(tmp_path)
    config = json.loads((adapter / "adapter_config.json").read_text())
    del config["lora_alpha"]
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    assert torch.allclose(mg.open(f"{base}+{adapter}").read("inner.weight"), expected["inner.weight"], atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"alpha_pattern": {"*q_proj": 2}}, r"alpha_pattern: '\*q_proj' is not a supported regular expression"),
        ({"rank_pattern": {"(": 2}}, r"rank_pattern: '\(' is not a supported regular expression"),
        ({"rank_pattern": {"(?=q)q_proj": 2}}, "is not supported here"),
        ({"rank_pattern": {f"(q{i})+": 2 for i in range(40)}}, "rank_pattern: more than 32 regular expressions"),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern: expected a JSON object"),
        ({"rank_pattern": {"q_proj": "2"}}, r"rank_pattern\['q_proj'\] is '2' in its config, not a number"),
        ({"rank_pattern": {"q_proj": 2}, "lora_alpha": None}, "lora_alpha is None in its config, not a number"),
    ],
)
def test_settings_that_make_no_sense(tmp_path: Path, settings: dict[str, object], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        llama_adapter(tmp_path / "a", **settings)


def test_factors_of_unequal_rank(tmp_path: Path) -> None:
    base, adapter, _ = adapted(tmp_path)
    weights = load_file(adapter / "adapter_model.safetensors")
    name = "base_model.model.inner.lora_B.weight"
    for shape in ((6, 3), (6,)):
        save_file(weights | {name: torch.ones(shape)}, adapter / "adapter_model.safetensors")
        with pytest.raises(CheckpointError, match=r"lora_B.weight' has rank \d, the config says 2"):
            mg.open(f"{base}+{adapter}")


def test_a_config_that_is_no_object(tmp_path: Path) -> None:
    base, adapter, _ = adapted(tmp_path)
    for text, message in (("[]", "expected a JSON object"), ("{", "not valid JSON")):
        (adapter / "adapter_config.json").write_text(text)
        for reference in (adapter, f"{base}+{adapter}"):
            with pytest.raises(CheckpointError, match=message):
                mg.open(reference)


def test_adapters_over_each_other(tmp_path: Path) -> None:
    base, adapter, _ = adapted(tmp_path)
    other = shutil.copytree(adapter, tmp_path / "other")
    config = json.loads((adapter / "adapter_config.json").read_text())

    def over(directory: Path, below: Path) -> None:
        text = json.dumps(config | {"base_model_name_or_path": str(below)})
        (directory / "adapter_config.json").write_text(text)

    over(adapter, adapter)
    with pytest.raises(CheckpointError, match="the adapter is its own base"):
        mg.open(adapter)
    over(adapter, other)
    over(other, adapter)
    with pytest.raises(CheckpointError, match="the adapter is its own base"):
        mg.open(adapter)
    over(other, base)
    plain, once, twice = (mg.open(place).read("inner.weight") for place in (base, other, adapter))
    assert torch.allclose(twice - once, once - plain, atol=1e-6)


def test_a_bare_adapter_finds_its_base(tmp_path: Path) -> None:
    base, adapter, expected = adapted(tmp_path)
    config = json.loads((adapter / "adapter_config.json").read_text())
    with pytest.raises(CheckpointError, match=r"without its base; write BASE\+"):
        mg.open(adapter)
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": str(base)}))
    assert torch.allclose(mg.open(adapter).read("inner.weight"), expected["inner.weight"], atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 2}, "is a PROMPT_TUNING adapter and cannot be attached"),
        ({"peft_type": "IA3"}, "conv.lora_A.weight' and cannot be attached to its base"),
        ({"peft_type": "NEW"}, "is a NEW adapter and cannot be attached to its base"),
        ({"use_dora": True}, "uses DoRA, but 'conv' has no lora_magnitude_vector"),
        ({"r": 3}, "has rank 2, the config says 3"),
    ],
)
def test_what_cannot_be_applied(tmp_path: Path, change: dict[str, object], message: str) -> None:
    base, adapter, _ = adapted(tmp_path)
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | change))
    with pytest.raises(CheckpointError, match=message):
        mg.open(f"{base}+{adapter}")


@pytest.mark.parametrize("start", ["pissa", "pissa_niter_4", "olora", "OLoRA", "corda", "loftq", "lora_ga", "new"])
def test_initialisations_that_change_the_base_are_refused(tmp_path: Path, start: str) -> None:
    with pytest.raises(CheckpointError, match=rf"init_lora_weights is '{start}'.*path_initial_model_for_weight_conv"):
        llama_adapter(tmp_path / "a", init_lora_weights=start)


@pytest.mark.parametrize("start", [True, False, "gaussian", "eva", "orthogonal", "mica"])
def test_initialisations_that_leave_the_base_alone(tmp_path: Path, start: object) -> None:
    settings = {"rank_pattern": {"q_proj": 2}, "init_lora_weights": start}
    assert len(llama_adapter(tmp_path / "a", **settings).updates) == 4


def test_a_converted_adapter_fits_the_base_that_pissa_changed(tmp_path: Path) -> None:
    net = Net()
    (tmp_path / "base").mkdir()
    save_file(net.state_dict(), tmp_path / "base" / "model.safetensors")
    model = peft.get_peft_model(net, peft.LoraConfig(target_modules=["inner"], r=2, init_lora_weights="pissa"))
    model.peft_config["default"].init_lora_weights = True
    model.save_pretrained(tmp_path / "start")
    model.peft_config["default"].init_lora_weights = "pissa"
    for name, parameter in model.named_parameters():
        if "lora" in name:
            parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(tmp_path / "plain")
    with pytest.raises(CheckpointError, match="init_lora_weights is 'pissa'"):
        mg.open(f"{tmp_path}/base+{tmp_path}/plain")
    model.save_pretrained(tmp_path / "converted", path_initial_model_for_weight_conversion=tmp_path / "start")
    opened = mg.open(f"{tmp_path}/base+{tmp_path}/converted")
    assert torch.allclose(opened.read("inner.weight"), model.merge_and_unload().inner.weight, atol=1e-5)


@pytest.mark.parametrize("rows", [14, 9])
def test_a_resized_embedding_has_its_own_shape(tmp_path: Path, rows: int) -> None:
    base, adapter, _ = adapted(tmp_path)
    weights = load_file(adapter / "adapter_model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if "embed" not in name}
    embedding = torch.randn(rows, 8)
    kept["base_model.model.embed.modules_to_save.weight"] = embedding
    save_file(kept, adapter / "adapter_model.safetensors")
    opened = mg.open(f"{base}+{adapter}")
    assert opened.spec("embed.weight").shape == (rows, 8)
    assert torch.equal(opened.read("embed.weight"), embedding)
    assert torch.equal(mg.merge([opened])["embed.weight"], embedding)
    with pytest.raises(CheckpointError, match=rf"'embed.weight' has unequal shapes: .*\[{rows}, 8\]"):
        mg.merge([base, opened])


def test_an_adapter_of_another_model(tmp_path: Path) -> None:
    base, adapter, _ = adapted(tmp_path)
    weights = load_file(base / "model.safetensors")
    save_file({k: v for k, v in weights.items() if k != "inner.weight"}, base / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"changes 'inner.weight', which .* does not have"):
        mg.open(f"{base}+{adapter}")
    save_file(weights | {"inner.weight": torch.zeros(9, 9)}, base / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"'inner.weight' fits \[6, 8\], the base has \[9, 9\]"):
        mg.open(f"{base}+{adapter}")
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no adapter_model\.safetensors"):
        mg.open(f"{base}+{adapter}")


def test_a_proof_compares_every_layer_with_peft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, adapter, _ = adapted(tmp_path, rank_pattern={"inner": 4})
    opened = mg.open(f"{base}+{adapter}")
    proofs = {proof.kind: proof for proof in prove(opened)}
    assert set(proofs) == {"Linear", "Embedding", "Conv2d", "saved"}
    assert all(proof.residual < 1e-6 and proof.own for proof in proofs.values())
    monkeypatch.setattr(AdapterFile, "_scale", lambda *_: 0.5)
    with pytest.raises(MerganserError, match="Conv2d layers differ from PEFT's merge by 8.[78]e-01 of what"):
        prove(mg.open(f"{base}+{adapter}"))


def test_merge_prints_its_proofs(tmp_path: Path) -> None:
    base, adapter, expected = adapted(tmp_path)
    (tmp_path / "recipe.yml").write_text(f"method: passthrough\nmodels: [{base}+{adapter}]\n")
    result = CliRunner().invoke(cli.build(), ["merge", str(tmp_path / "recipe.yml"), str(tmp_path / "out"), "--prove"])
    assert result.exit_code == 0, result.output
    assert "weights of kind Linear as PEFT" in " ".join(result.output.split())
    assert torch.allclose(mg.open(tmp_path / "out").read("inner.weight"), expected["inner.weight"], atol=1e-6)
    (tmp_path / "plain.yml").write_text(f"method: passthrough\nmodels: [{base}]\n")
    result = CliRunner().invoke(cli.build(), ["merge", str(tmp_path / "plain.yml"), str(tmp_path / "o"), "--prove"])
    assert "nothing to prove" in result.output


def test_an_adapter_is_saved_with_its_base(tmp_path: Path) -> None:
    base, adapter, _ = adapted(tmp_path)
    (base / "config.json").write_text('{"torch_dtype": "float32"}')
    opened = mg.open(f"{base}+{adapter}")
    written = mg.open(mg.save(f"{base}+{adapter}", tmp_path / "baked", dtype="float64"))
    for name in opened.names():
        assert torch.equal(written.read(name), opened.read(name).double())
    assert '"torch_dtype": "float64"' in (tmp_path / "baked" / "config.json").read_text()
