from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import merganser as mg
from merganser.errors import CheckpointError

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


def test_a_bare_adapter_finds_its_base(tmp_path: Path) -> None:
    base, adapter, expected = adapted(tmp_path)
    config = json.loads((adapter / "adapter_config.json").read_text())
    with pytest.raises(CheckpointError, match=r"without its base; name it as BASE\+"):
        mg.open(adapter)
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": str(base)}))
    assert torch.allclose(mg.open(adapter).read("inner.weight"), expected["inner.weight"], atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peft_type": "IA3"}, "a IA3 adapter; only LoRA"),
        ({"use_dora": True}, "uses DoRA"),
        ({"bias": "all"}, "trains biases"),
        ({"r": 3}, "has rank 2, the config says 3"),
    ],
)
def test_what_cannot_be_applied(tmp_path: Path, change: dict[str, object], message: str) -> None:
    base, adapter, _ = adapted(tmp_path)
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | change))
    with pytest.raises(CheckpointError, match=message):
        mg.open(f"{base}+{adapter}")


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
