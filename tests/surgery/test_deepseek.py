"""Mixtures in DeepSeek's layout load through the code that their config names, and do what their experts do.

The code on the hub is replaced by a naive version of the architecture, at the place where transformers looks for it.
"""

from __future__ import annotations

import json

import pytest
import torch

import merganser as mg
from merganser.errors import InputError

MODELING = '''
import torch
from torch import nn
from transformers import LlamaForCausalLM, LlamaModel

from .configuration_deepseek import DeepseekConfig


class MLP(nn.Module):
    def __init__(self, hidden, wide):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(hidden, wide, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(wide, hidden, bias=False)

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class MoE(nn.Module):
    """Every token's experts one by one, weighted by the softmax over all; normalised if there are several."""

    def __init__(self, config):
        super().__init__()
        self.config, wide = config, config.moe_intermediate_size
        self.gate = nn.Linear(config.hidden_size, config.n_routed_experts, bias=False)
        self.experts = nn.ModuleList(MLP(config.hidden_size, wide) for _ in range(config.n_routed_experts))
        if config.n_shared_experts:
            self.shared_experts = MLP(config.hidden_size, wide * config.n_shared_experts)

    def forward(self, x):
        count, rows = self.config.num_experts_per_tok, []
        for token in x.reshape(-1, x.shape[-1]):
            weights, chosen = self.gate(token).softmax(0).topk(count)
            if count > 1 and self.config.norm_topk_prob:
                weights = weights / weights.sum()
            row = sum(weight * self.experts[i](token) for weight, i in zip(weights, chosen.tolist()))
            rows.append(row + self.shared_experts(token) if self.config.n_shared_experts else row)
        return torch.stack(rows).view_as(x)


class DeepseekModel(LlamaModel):
    config_class = DeepseekConfig

    def __init__(self, config):
        super().__init__(config)
        for layer in self.layers[config.first_k_dense_replace :: config.moe_layer_freq]:
            layer.mlp = MoE(config)


class DeepseekForCausalLM(LlamaForCausalLM):
    config_class = DeepseekConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = DeepseekModel(config)
        self.post_init()
'''
#: As in the code on the hub, rotary embeddings have their settings of transformers 4; those of 5 are unknown to it.
CONFIGURATION = """
from transformers import LlamaConfig


class DeepseekConfig(LlamaConfig):
    model_type = "deepseek"
    n_shared_experts: int | None = None

    def __init__(self, rope_parameters=None, **settings):
        super().__init__(**settings)
"""
TOKENS = torch.tensor([[5, 7, 11, 13, 2, 30]])


@pytest.fixture
def load(tmp_path):
    """Load a model with custom code as a user does, who has it in the hub's cache."""
    transformers = pytest.importorskip("transformers")
    place = tmp_path / "hub" / "models--deepseek-ai--deepseek-moe-16b-base"
    code = place / "snapshots" / ("0" * 40)
    code.mkdir(parents=True)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("0" * 40)
    (code / "modeling_deepseek.py").write_text(MODELING)
    (code / "configuration_deepseek.py").write_text(CONFIGURATION)

    def from_pretrained(path):
        model, said = transformers.AutoModelForCausalLM.from_pretrained(
            path,
            trust_remote_code=True,
            cache_dir=tmp_path / "hub",
            local_files_only=True,
            output_loading_info=True,
            dtype=torch.float32,
        )
        assert not any(said.values()), said
        return model.eval()

    return from_pretrained


def save(base, experts, out, *, shared=None, gate_mode="random", **settings):
    asked = {
        "base_model": str(base),
        "experts": [{"source_model": str(path), **more} for path, more in experts],
        "gate_mode": gate_mode,
        **settings,
    }
    if shared is not None:
        asked["shared_experts"] = [{"source_model": str(base), "residual_scale": shared}]
        asked["architecture"] = "deepseek"
    return mg.save(mg.surgery.moe(asked), out)


@torch.no_grad()
def logits(model):
    return model(TOKENS).logits


ROPES = [
    {},
    {"rope_theta": 50.0},
    {"rope_parameters": {"rope_theta": 50.0, "rope_type": "default"}},
    {"rope_parameters": {"rope_theta": 50.0, "rope_type": "linear", "factor": 4.0}},
]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("edits", ROPES)
def test_identical_experts_do_what_the_dense_model_does(llama, load, tmp_path, edits, tied):
    base = llama("base", tied=tied, **edits)
    out = save(base, [(base, {})] * 3, tmp_path / "out", architecture="deepseek", experts_per_token=2)
    model = load(out)
    assert type(model).__name__ == "DeepseekForCausalLM"
    torch.testing.assert_close(logits(model), logits(load(base)))
    assert model.generate(TOKENS, max_new_tokens=3, do_sample=False).shape == (1, 9)


def test_a_shared_expert_is_added_to_the_routed_ones(llama, load, tmp_path):
    base = llama("base")
    experts = [(base, {"residual_scale": 0.25})] * 3
    out = save(base, experts, tmp_path / "out", shared=0.75, experts_per_token=2)
    torch.testing.assert_close(logits(load(out)), logits(load(base)))


def test_without_a_shared_expert_it_does_what_mixtral_does(llama, load, tmp_path):
    """Mixtral takes the softmax over the chosen experts, DeepSeek normalises that over all, which is the same."""
    base, a, b, c = (llama(name, seed=seed) for seed, name in enumerate("wxyz"))
    experts = [(path, {}) for path in (a, b, c)]
    made = {
        kind: logits(load(save(base, experts, tmp_path / kind, architecture=kind))) for kind in ("deepseek", "mixtral")
    }
    torch.testing.assert_close(made["deepseek"], made["mixtral"])
    assert not torch.allclose(made["mixtral"], logits(load(base)))


def test_experts_per_token_are_those_of_mergekit(llama, tmp_path):
    base = llama("base")

    def chosen(name, count, **settings):
        out = save(base, [(base, {})] * count, tmp_path / name, **settings)
        return json.loads((out / "config.json").read_text())["num_experts_per_tok"]

    assert chosen("shared", 3, shared=0.5) == 1
    assert chosen("two", 3, shared=0.5, experts_per_token=2) == 2
    assert chosen("routed", 3, architecture="deepseek") == 2
    assert chosen("null", 3, experts_per_token=None) == 2
    assert chosen("single", 1) == 1


def test_the_plan_says_what_loads_it(llama, tmp_path):
    base = llama("base")
    asked = {"base_model": str(base), "gate_mode": "random", "experts": [{"source_model": str(base)}] * 2}
    assert any("trust_remote_code" in note for note in mg.surgery.moe(asked | {"architecture": "deepseek"}).plan.notes)
    assert not any("trust_remote_code" in note for note in mg.surgery.moe(asked).plan.notes)


def test_heads_of_another_width_are_refused(llama):
    base = llama("base", head_dim=8)
    asked = {"base_model": str(base), "gate_mode": "random", "experts": [{"source_model": str(base)}] * 2}
    with pytest.raises(InputError, match="deepseek has no setting for the width of heads, which is 8 here, not 8 / 2"):
        mg.surgery.moe(asked | {"architecture": "deepseek"})


def test_custom_code_of_the_dense_base_is_not_named_for_the_mixture(llama, tmp_path):
    base = llama("base", auto_map={"AutoModelForCausalLM": "modeling_mine.MineForCausalLM"})
    (base / "modeling_mine.py").write_text("")
    out = save(base, [(base, {})] * 2, tmp_path / "out")
    assert "auto_map" not in json.loads((out / "config.json").read_text())
