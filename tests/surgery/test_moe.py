"""Mixtures of experts made of dense models: tensors, gates, configs, and what transformers makes of them."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import merganser as mg
from merganser.errors import InputError, RecipeError
from merganser.surgery.gates import singular_gates

MLP = ("gate_proj", "up_proj", "down_proj")


def recipe(base, experts, **settings):
    return {
        "base_model": str(base),
        "experts": [
            {"source_model": str(path), "positive_prompts": [text]}
            for path, text in zip(experts, ["the quick fox", "a little girl", "weights are averaged"], strict=False)
        ],
        **settings,
    }


@pytest.fixture
def dense(llama):
    return [llama(name, seed=seed) for seed, name in enumerate(["base", "a", "b"])]


@pytest.mark.parametrize("gate", ["hidden", "hidden_avg", "cheap_embed", "random", "uniform_random", "singular"])
def test_mixtral_loads_and_routes(dense, tmp_path, gate):
    """With experts_per_token = experts, the layer is the mean of the experts weighted by the softmax of the gate."""
    transformers = pytest.importorskip("transformers")
    base, *experts = dense
    out = mg.save(mg.surgery.moe(recipe(base, experts, gate_mode=gate)), tmp_path / "out")
    model = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert type(model).__name__ == "MixtralForCausalLM"
    assert model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=3).shape == (1, 6)
    made = mg.open(out)
    states = torch.randn(1, 5, 8)
    layer = model.model.layers[1]
    block = getattr(layer, "mlp", None) or layer.block_sparse_moe
    with torch.no_grad():
        got = block(states)
    got = got[0] if isinstance(got, tuple) else got
    weights = (states @ made["model.layers.1.block_sparse_moe.gate.weight"].T).softmax(-1)
    expected = torch.zeros_like(states)
    for i, path in enumerate(experts):
        source = mg.open(path)
        gate_proj, up, down = (source[f"model.layers.1.mlp.{part}.weight"] for part in MLP)
        hidden = torch.nn.functional.silu(states @ gate_proj.T) * (states @ up.T)
        expected += weights[..., i : i + 1] * (hidden @ down.T)
    torch.testing.assert_close(got, expected)
    assert torch.equal(
        made["model.layers.0.self_attn.q_proj.weight"], mg.open(base)["model.layers.0.self_attn.q_proj.weight"]
    )
    assert (out / "tokenizer.json").is_file()


def test_equal_experts_do_what_the_dense_model_does(dense, tmp_path):
    transformers = pytest.importorskip("transformers")
    base = dense[0]
    out = mg.save(mg.surgery.moe(recipe(base, [base, base], gate_mode="random", seed=3)), tmp_path / "out")
    load = transformers.AutoModelForCausalLM.from_pretrained
    tokens = torch.tensor([[5, 7, 11, 13]])
    with torch.no_grad():
        torch.testing.assert_close(load(out)(tokens).logits, load(base)(tokens).logits)


def test_gates_of_prompts(dense):
    transformers = pytest.importorskip("transformers")
    base, *experts = dense
    asked = recipe(base, experts)
    asked["experts"][0]["negative_prompts"] = ["dogs and foxes meet"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)

    def embed(text, mode):
        ids = tokenizer(tokenizer.bos_token + text, add_special_tokens=False, return_tensors="pt").input_ids
        if mode == "cheap_embed":
            total = model.get_input_embeddings()(ids)[0].sum(0)
            return (total / total.norm()).expand(2, -1)
        states = torch.stack(model(ids, output_hidden_states=True).hidden_states[:2])[:, 0]
        return states[:, -1] if mode == "hidden" else states.mean(1)

    for mode in ("hidden", "hidden_avg", "cheap_embed"):
        view = mg.surgery.moe(asked | {"gate_mode": mode})
        with torch.no_grad():
            first = embed("the quick fox", mode) - embed("dogs and foxes meet", mode)
            second = embed("a little girl", mode)
        for layer in range(2):
            expected = torch.stack([v[layer] / v[layer].norm() for v in (first, second)])
            torch.testing.assert_close(view[f"model.layers.{layer}.block_sparse_moe.gate.weight"], expected)


def halves_of_inputs(generator, count=600, hidden=16):
    """States in either half of the units, and a base with two experts that changed the layers' inputs of one half."""
    first = torch.rand(count, generator=generator) < 0.5
    rows = torch.rand(count, hidden, generator=generator)  # a mean, without which no linear gate can tell them apart
    rows[first, 8:] *= 0.1
    rows[~first, :8] *= 0.1
    name = "model.layers.0.mlp.{}_proj.weight".format
    tensors = {name(part): torch.randn(24, hidden, generator=generator) for part in ("gate", "up")}
    experts = []
    for chosen in (slice(0, 8), slice(8, 16)):
        change = torch.zeros(24, hidden)
        change[:, chosen] = torch.randn(24, 8, generator=generator)
        experts.append(mg.open(tensors | {name(p): tensors[name(p)] + change for p in ("gate", "up")}))
    return rows / rows.pow(2).mean(1, keepdim=True).sqrt(), first, mg.open(tensors), experts


@pytest.mark.parametrize("shown", ["both", "first"])
def test_singular_gates_choose_the_expert_whose_subspace_holds_the_state(shown):
    """Also if the base writes only texts like those of one expert: what it writes is not neutral."""
    states, first, base, experts = halves_of_inputs(torch.Generator().manual_seed(0))
    gates = singular_gates(base, experts, [states if shown == "both" else states[first]])[0]
    right = (states @ gates.T).argmax(1) == (~first).long()
    assert right.float().mean() > 0.99


def test_singular_gates_are_the_discriminant_of_naive_moments():
    states, _, base, experts = halves_of_inputs(torch.Generator().manual_seed(1))
    inputs = states.double().numpy()
    mean, square = inputs.mean(0), (inputs**2).sum(1).mean()
    moments, means = [], []
    for expert in experts:
        change = np.concatenate([(expert[n].double() - base[n].double()).numpy() for n in base])
        _, values, right = np.linalg.svd(change, full_matrices=False)
        moments.append(
            square * sum(v * v * np.outer(r, r) for v, r in zip(values, right, strict=True)) / (values @ values)
        )
        means.append(moments[-1] @ mean / np.sqrt(mean @ moments[-1] @ mean))
    within = sum(moments) / 2
    expected = np.linalg.inv(within + 3 * np.trace(within) / 16 * np.eye(16)) @ np.array(means).T
    np.testing.assert_allclose(singular_gates(base, experts, [states])[0], expected.T, rtol=1e-4, atol=1e-6)
    still = singular_gates(base, [experts[0], base], [states])[0]
    assert still[0].abs().sum() > 0
    assert not still[1].any()


def test_singular_gates_are_fitted_on_what_enters_the_mlps(dense, monkeypatch):
    """Text that the base writes, the same for a seed; the states are those behind the norm of each layer."""
    transformers = pytest.importorskip("transformers")
    base, *experts = dense
    seen = []

    def record(base, experts, states):
        seen.append(states)
        return singular_gates(base, experts, states)

    monkeypatch.setattr("merganser.surgery.gates.singular_gates", record)
    before = torch.random.get_rng_state()
    gates = [mg.surgery.moe(recipe(base, experts, gate_mode="singular", seed=s)) for s in (0, 0, 1)]
    assert torch.equal(torch.random.get_rng_state(), before)
    name = "model.layers.1.block_sparse_moe.gate.weight"
    assert torch.equal(gates[0][name], gates[1][name])
    assert not torch.equal(gates[0][name], gates[2][name])
    network = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    entered = []
    norm = network.model.layers[1].post_attention_layernorm
    norm.register_forward_hook(lambda _module, _inputs, output: entered.append(output[0, 0]))
    with torch.no_grad():
        network(torch.tensor([[network.config.bos_token_id]]))
    assert len(seen[0]) == 2
    torch.testing.assert_close(seen[0][1][0], entered[0])


def test_qwen_and_deepseek_layouts(llama, tmp_path):
    transformers = pytest.importorskip("transformers")
    base, a, b = (llama(name, seed=seed) for seed, name in enumerate(["base", "a", "b"]))
    asked = recipe(base, [a, b], gate_mode="cheap_embed", architecture="qwen")
    shared = [{"source_model": str(base), "positive_prompts": ["what they know"], "residual_scale": 0.5}]
    out = mg.save(mg.surgery.moe(asked | {"shared_experts": shared}), tmp_path / "qwen2")
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert type(model).__name__ == "Qwen2MoeForCausalLM"
    assert torch.isfinite(model(torch.tensor([[1, 2]])).logits).all()
    made, source = mg.open(out), mg.open(base)
    assert made.spec("model.layers.0.mlp.shared_expert_gate.weight").shape == (1, 8)
    name = "model.layers.1.mlp.{}down_proj.weight".format
    torch.testing.assert_close(made[name("shared_expert.")], source[name("")] * 0.5)
    assert torch.equal(made[name("experts.1.")], mg.open(b)[name("")])

    asked |= {"architecture": "deepseek", "dtype": "bfloat16"}
    out = mg.save(mg.surgery.moe(asked), tmp_path / "deepseek")
    config = json.loads((out / "config.json").read_text())
    assert config["model_type"] == "deepseek"
    assert config["n_routed_experts"] == 2
    assert mg.open(out).spec("model.layers.0.mlp.gate.weight").dtype == torch.bfloat16

    qwen3 = [llama(f"q{i}", seed=i, model_type="qwen3", architectures=["Qwen3ForCausalLM"]) for i in range(3)]
    view = mg.surgery.moe(recipe(qwen3[0], qwen3[1:], gate_mode="uniform"))
    assert dict(view.plan.sidecars.config)[("model_type",)] == "qwen3_moe"
    assert view["model.layers.0.mlp.gate.weight"].abs().max() <= 8**-0.5


def test_noise_is_the_same_in_any_blocks(dense):
    base, *experts = dense
    asked = recipe(base, experts, gate_mode="random")
    asked["experts"][1]["noise_scale"] = 0.1
    view = mg.surgery.moe(asked)
    name, plain = "model.layers.0.block_sparse_moe.experts.1.w1.weight", mg.open(experts[1])
    noise = view[name] - plain["model.layers.0.mlp.gate_proj.weight"]
    assert 0.05 < noise.std() < 0.2
    assert torch.equal(view.read(name, (3, 7)), view[name][3:7])


def test_resumes_and_says_when_complete(dense, tmp_path):
    base, *experts = dense
    asked = recipe(base, experts, gate_mode="cheap_embed")
    out = mg.save(mg.surgery.moe(asked), tmp_path / "out")
    complete = []
    mg.save(mg.surgery.moe(asked), out, resume=True, on_complete=complete.append)
    assert complete == [out]


def test_refusals(llama, dense, tmp_path):
    base, *experts = dense
    with pytest.raises(RecipeError, match="unknown gate 'hiden'; did you mean 'hidden'"):
        mg.surgery.moe(recipe(base, experts, gate_mode="hiden"))
    with pytest.raises(RecipeError, match=r"experts_per_token: expected 1 to 2"):
        mg.surgery.moe(recipe(base, experts, experts_per_token=3))
    bare = recipe(base, experts)
    del bare["experts"][1]["positive_prompts"]
    with pytest.raises(RecipeError, match=r"experts\[1\]\.positive_prompts: gate_mode: hidden needs prompts"):
        mg.surgery.moe(bare)
    same = recipe(base, experts)
    same["experts"][1]["positive_prompts"] = same["experts"][0]["positive_prompts"]
    with pytest.raises(RecipeError, match="same prompts"):
        mg.surgery.moe(same)
    with pytest.raises(InputError, match=r"experts\[1\]: .*no such file or directory"):
        mg.surgery.moe(recipe(base, [experts[0], tmp_path / "nowhere"]))
    bert = llama("bert", model_type="bert")
    with pytest.raises(InputError, match="no mixture can be made.*mixtral has a place for the experts of llama or"):
        mg.surgery.moe(recipe(bert, [bert, bert], gate_mode="random"))
    with pytest.raises(InputError, match="must have the architecture of the base"):
        mg.surgery.moe(recipe(base, [experts[0], bert], gate_mode="random"))
    with pytest.raises(InputError, match="qwen2 takes 1 shared expert, not 0"):
        mg.surgery.moe(recipe(base, experts, gate_mode="random", architecture="qwen"))
    with pytest.raises(InputError, match="must have the sizes of the base"):
        mg.surgery.moe(recipe(base, [experts[0], llama("wide", hidden=12)], gate_mode="random"))


def test_an_expert_of_another_depth_is_refused(llama):
    from safetensors.torch import load_file, save_file

    base, a, deep = llama("base"), llama("a", seed=1), llama("deep", seed=2)
    tensors = load_file(deep / "model.safetensors")
    third = {name.replace(".1.", ".2."): tensor.clone() for name, tensor in tensors.items() if ".layers.1." in name}
    save_file(tensors | third, deep / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=r"deep has more than the 2 layers of .*base"):
        mg.surgery.moe(recipe(base, [a, deep], gate_mode="random"))
    with pytest.raises(InputError, match="expected an MLP with gate_proj"):
        mg.surgery.moe(recipe(deep, [a, deep], gate_mode="random"))


@pytest.mark.parametrize("gate", ["hidden", "cheap_embed"])
def test_prompts_need_a_tokenizer_in_the_base(dense, gate):
    base, *experts = dense
    for file in base.glob("*token*"):
        file.unlink()
    with pytest.raises(InputError, match=f"gate_mode: {gate} .* tokenizer of .*base, which cannot be loaded"):
        mg.surgery.moe(recipe(base, experts, gate_mode=gate))


@pytest.mark.parametrize("gate", ["hidden", "hidden_avg", "cheap_embed"])
def test_a_shared_expert_without_a_gate_needs_no_prompts(dense, gate):
    base, a, b = dense
    asked = recipe(base, [a, b], gate_mode=gate, architecture="deepseek", shared_experts=[{"source_model": str(base)}])
    made = mg.surgery.moe(asked)
    assert made.spec("model.layers.0.mlp.gate.weight").shape == (2, 8)
    assert torch.equal(made["model.layers.1.mlp.gate.weight"].norm(dim=1).round(decimals=5), torch.ones(2))


@pytest.mark.parametrize(
    ("name", "layout"),
    [("mlp.down_proj.bias", "mixtral"), ("self_attn.o_proj.bias", "qwen2"), ("self_attn.q_proj.bias", "mixtral")],
)
def test_biases_that_the_mixture_has_no_place_for_are_refused(llama, name, layout):
    """They would be dropped, or written where transformers ignores them."""
    from safetensors.torch import load_file, save_file

    base, a = llama("base"), llama("a", seed=1)
    for path in (base, a):
        tensors = load_file(path / "model.safetensors")
        save_file(tensors | {f"model.layers.1.{name}": torch.ones(8)}, path / "model.safetensors", {"format": "pt"})
    shared = {"shared_experts": [{"source_model": str(base)}]} if layout == "qwen2" else {}
    with pytest.raises(InputError, match=f"{name}.*{layout}"):
        mg.surgery.moe(recipe(base, [a, a], gate_mode="random", architecture=layout, **shared))
