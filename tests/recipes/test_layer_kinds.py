"""Stacks with layers of two kinds: what is made loads in transformers without a weight missing, or is refused."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from merganser import recipes
from merganser.errors import CheckpointError, InputError, RecipeError
from merganser.recipes.layer_kinds import Kinds
from merganser.recipes.layer_places import continue_periodically
from merganser.recipes.running import run

try:
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM
except (ImportError, RuntimeError) as error:
    pytest.skip(f"transformers cannot be imported here: {error}", allow_module_level=True)

SMALL = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 6,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8, "head_dim": 8}
DEEPSEEK = {
    "n_routed_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8, "n_shared_experts": 1, "n_group": 1,
    "topk_group": 1, "kv_lora_rank": 4, "q_lora_rank": 4, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
}  # fmt: skip
JAMBA = {
    "attn_layer_period": 3, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
    "num_experts": 2, "num_experts_per_tok": 1, "mamba_d_state": 4, "mamba_dt_rank": 4, "use_mamba_kernels": False,
}  # fmt: skip
GEMMA4 = {
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2, "sliding_window": 8, "head_dim": 8,
    "global_head_dim": 4, "hidden_size_per_layer_input": 0,
}  # fmt: skip
SLIDING = {"sliding_window": 8, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2}
#: A model -> its kind, its settings, slices, and what the config of the output must say; None if it is refused.
STACKS = {
    "dense, some": (
        "qwen3_moe", MOE | {"mlp_only_layers": [0, 3]}, [(0, 4), (2, 6)], {"mlp_only_layers": [0, 3, 5]},
    ),
    "without the dense": ("qwen3_moe", MOE | {"mlp_only_layers": [0]}, [(1, 6)], {"mlp_only_layers": []}),
    "sparse step": (
        "qwen3_moe", MOE | {"decoder_sparse_step": 2}, [(0, 3), (2, 6)],
        {"decoder_sparse_step": 1, "mlp_only_layers": [0, 2, 3, 5]},
    ),
    "qwen2 moe": (
        "qwen2_moe", MOE | {"mlp_only_layers": [1], "shared_expert_intermediate_size": 8}, [(1, 3), (0, 2)],
        {"mlp_only_layers": [0, 3]},
    ),
    "dense first": (
        "deepseek_v3", DEEPSEEK | {"first_k_dense_replace": 2}, [(1, 5), (2, 6)], {"first_k_dense_replace": 1},
    ),
    "no dense": ("deepseek_v3", DEEPSEEK | {"first_k_dense_replace": 1}, [(1, 5)], {"first_k_dense_replace": 0}),
    "dense again": ("deepseek_v3", DEEPSEEK | {"first_k_dense_replace": 1}, [(0, 3), (0, 3)], None),
    "deepseek v2": (
        "deepseek_v2", {**DEEPSEEK, "first_k_dense_replace": 2, "topk_method": "greedy"}, [(0, 3), (2, 6)],
        {"first_k_dense_replace": 2},
    ),
    "in step": ("jamba", JAMBA, [(0, 6), (0, 6)], {"attn_layer_period": 3}),
    "out of step": ("jamba", JAMBA, [(0, 4), (2, 6)], None),
    "windows": (
        "gemma3_text", SLIDING | {"head_dim": 8}, [(0, 3), (1, 6)],
        {"layer_types": [SLIDING["layer_types"][i] for i in (0, 1, 2, 1, 2, 3, 4, 5)]},
    ),
    "short convolutions": (
        "lfm2", {"layer_types": ["conv", "full_attention", "conv"] * 2, "block_multiple_of": 8}, [(0, 2), (1, 6)],
        {"layer_types": ["conv", "full_attention", "full_attention", "conv", "conv", "full_attention", "conv"]},
    ),
    "linear attention": (
        "qwen3_next",
        MOE | {"layer_types": ["linear_attention", "full_attention"] * 3, "linear_num_value_heads": 2,
               "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
               "shared_expert_intermediate_size": 8},
        [(1, 4), (3, 6)],
        {"layer_types": ["full_attention", "linear_attention", "full_attention"] * 2},
    ),
    "ernie": (
        "ernie4_5_moe",
        {"moe_num_experts": 2, "moe_k": 1, "moe_intermediate_size": 8, "moe_layer_start_index": 1,
         "moe_layer_end_index": 5, "moe_layer_interval": 1, "moe_num_shared_experts": 1},
        [(1, 3), (0, 2)],
        None,
    ),
    "ernie, a range": (
        "ernie4_5_moe",
        {"moe_num_experts": 2, "moe_k": 1, "moe_intermediate_size": 8, "moe_layer_start_index": 1,
         "moe_layer_end_index": -1, "moe_layer_interval": 2, "moe_num_shared_experts": 1},
        [(0, 4), (2, 6)],
        {"moe_layer_start_index": 1, "moe_layer_end_index": 7, "moe_layer_interval": 2},
    ),
    "llama 4": (
        "llama4_text",
        {"num_local_experts": 2, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2, "intermediate_size_mlp": 16,
         "attention_chunk_size": 8, "head_dim": 8},
        [(0, 2), (1, 6)],
        {"moe_layers": [1, 2, 4, 6], "no_rope_layers": [1, 1, 1, 1, 0, 1, 1]},
    ),
    "nemotron": (
        "nemotron_h",
        {"hybrid_override_pattern": "M*-M*-", "mamba_num_heads": 2, "mamba_head_dim": 16, "ssm_state_size": 4,
         "n_groups": 1},
        [(0, 3), (2, 6)],
        {"layers_block_type": ["linear_attention", "full_attention", "mlp", "mlp", "linear_attention", "full_attention",
                               "mlp"]},
    ),
    "settings by number": (
        "gemma4_text", GEMMA4, [(0, 4), (2, 6)], {"per_layer_config": {k: {"head_dim": 4} for k in "247"}},
    ),
    "full attention last": ("gemma4_text", GEMMA4, [(0, 4), (2, 5)], None),
    "columns for every layer": (
        "gemma4_text", GEMMA4 | {"hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 32}, [(3, 6), (0, 3)],
        None,
    ),
    "one kind": ("llama", {}, [(0, 4), (2, 6)], {"num_hidden_layers": 8}),
}  # fmt: skip


def save(path, kind, seed=0, **settings):
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **{**SMALL, **settings})
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


def load(path):
    model, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    return model, {key: list(info[key]) for key in ("missing_keys", "unexpected_keys", "mismatched_keys")}


@pytest.mark.parametrize("name", STACKS)
def test_stacked_layers_load_as_the_kind_they_are(name, tmp_path):
    kind, settings, slices, expected = STACKS[name]
    if kind not in transformers.CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {kind}")
    source = save(tmp_path / "a", kind, **settings)
    document = {"method": "passthrough", "slices": [{"path": str(source), "layers": list(each)} for each in slices]}
    if expected is None:
        with pytest.raises(InputError, match="slices: "):
            run(document, tmp_path / "out")
        return
    out = run(document, tmp_path / "out")
    config = json.loads((out / "config.json").read_text())
    assert {key: config[key] for key in expected} == expected
    model, info = load(out)
    assert not any(info.values()), info
    model(torch.arange(8)[None])
    original, made = load(source)[0].state_dict(), model.state_dict()
    order = [layer for first, last in slices for layer in range(first, last)]
    layers = {k: {n.split(".", 3)[3] for n in made if n.startswith(f"model.layers.{k}.")} for k in range(len(order))}
    for k, layer in enumerate(order):
        assert layers[k]
        for rest in layers[k]:
            assert torch.equal(made[f"model.layers.{k}.{rest}"], original[f"model.layers.{layer}.{rest}"])


def test_layers_of_another_architecture_are_refused(tmp_path):
    save(tmp_path / "mistral", "mistral", head_dim=8)
    save(tmp_path / "qwen", "qwen2")
    for first, second, message in (
        ("mistral", "qwen", r"which has 'self_attn.k_proj.bias'.*is a Qwen2ForCausalLM"),
        ("qwen", "mistral", r"which lacks 'self_attn.k_proj.bias'.*is a MistralForCausalLM"),
    ):
        slices = [{"path": str(tmp_path / name), "layers": [0, 3]} for name in (first, second)]
        with pytest.raises(CheckpointError, match=message):
            recipes.plan(recipes.load({"method": "passthrough", "slices": slices}))
    slices = [{"path": str(tmp_path / name), "layers": [0, 3]} for name in ("mistral", "qwen")]
    document = {"method": "passthrough", "slices": slices, "output": {"exclude": ["*_proj.bias"]}}
    out = run(document, tmp_path / "out")
    assert not any(load(out)[1].values())
    notes = recipes.plan(recipes.load(document)).notes
    assert any("is a Qwen2ForCausalLM" in note and "a MistralForCausalLM; the output uses" in note for note in notes)


def test_layers_of_another_width_are_refused(tmp_path):
    save(tmp_path / "a", "llama")
    save(tmp_path / "b", "llama", hidden_size=32)
    slices = [{"path": str(tmp_path / name), "layers": [0, 3]} for name in "ab"]
    with pytest.raises(CheckpointError) as error:
        recipes.plan(recipes.load({"method": "passthrough", "slices": slices}))
    assert "hidden_size is 32 in" in str(error.value)
    assert len(str(error.value).splitlines()) < 10


def test_kinds_come_from_the_model_the_layer_comes_from(tmp_path):
    a = save(tmp_path / "a", "qwen3_moe", **MOE, mlp_only_layers=[0])
    b = save(tmp_path / "b", "qwen3_moe", **MOE, mlp_only_layers=[5], seed=1)
    slices = [{"path": str(a), "layers": [0, 3]}, {"path": str(b), "layers": [3, 6]}]
    out = run({"method": "passthrough", "slices": slices}, tmp_path / "out")
    assert json.loads((out / "config.json").read_text())["mlp_only_layers"] == [0, 5]
    assert not any(load(out)[1].values())


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"rope_theta": 1e6}, "rope_theta 1000000.0 (10000.0 in"),
        ({"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 4}, "num_attention_heads 4 (2 in"),
        ({"max_position_embeddings": 128}, "max_position_embeddings 128 (64 in"),
        ({"rms_norm_eps": 1e-3}, "rms_norm_eps 0.001 (1e-06 in"),
        ({"hidden_act": "gelu"}, "hidden_act gelu (silu in"),
    ],
)
def test_settings_that_change_the_meaning_of_weights_are_noted(setting, said, tmp_path):
    save(tmp_path / "a", "llama")
    save(tmp_path / "b", "llama", seed=1, **setting)
    document = {"method": "linear", "models": [str(tmp_path / "a"), str(tmp_path / "b")]}
    notes = recipes.plan(recipes.load(document)).notes
    assert len(notes) == 1
    assert said in notes[0]
    assert "settings that change what its weights mean" in notes[0]


def test_kinds_of_layers_that_differ_are_noted_in_a_merge_and_not_in_a_stack(tmp_path):
    kinds = ["sliding_attention", "full_attention"] * 3
    save(tmp_path / "a", "qwen2", layer_types=kinds, sliding_window=4, use_sliding_window=True)
    save(tmp_path / "b", "qwen2", layer_types=kinds[::-1], sliding_window=4, use_sliding_window=True)
    notes = recipes.plan(recipes.load({"method": "linear", "models": [str(tmp_path / n) for n in "ab"]})).notes
    assert len(notes) == 1
    assert "layer_types ['full_attention', 'sliding_attention'" in notes[0]
    slices = [{"path": str(tmp_path / n), "layers": [i, i + 3]} for i, n in enumerate("ab")]
    plan = recipes.plan(recipes.load({"method": "passthrough", "slices": slices}))
    assert plan.notes == ()
    edits = {tuple(path): value for path, value in plan.sidecars.config}
    assert edits[("layer_types",)] == kinds[:3] + kinds[::-1][1:4]


@pytest.mark.parametrize("settings", [{"type": "yarn", "factor": 4.0}, {"rope_type": "yarn", "factor": 4.0}])
def test_scaled_positions_are_noted_against_unscaled_ones(settings, tmp_path):
    for name, scaling in {"a": None, "b": settings}.items():
        config = json.loads((save(tmp_path / name, "llama") / "config.json").read_text())
        config |= {"rope_theta": config.pop("rope_parameters")["rope_theta"], "rope_scaling": scaling}
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    notes = recipes.plan(recipes.load({"method": "linear", "models": [str(tmp_path / n) for n in "ab"]})).notes
    assert len(notes) == 1
    assert "rope_type yarn (default in" in notes[0]


def test_positions_of_one_kind_of_layers_are_compared(tmp_path):
    for name, theta in {"a": 1e4, "b": 1e6}.items():
        full = {"rope_type": "default", "rope_theta": theta}
        both = {"full_attention": full, "sliding_attention": full | {"rope_theta": 1e4}}
        save(tmp_path / name, "gemma3_text", **SLIDING, head_dim=8, rope_parameters=both)
    notes = recipes.plan(recipes.load({"method": "linear", "models": [str(tmp_path / n) for n in "ab"]})).notes
    assert len(notes) == 1
    assert "full_attention.rope_theta 1000000.0 (10000.0 in" in notes[0]


def test_like_models_have_no_notes(tmp_path):
    save(tmp_path / "a", "llama")
    save(tmp_path / "b", "llama", seed=1, attention_dropout=0.1, initializer_range=0.5, use_cache=False, eos_token_id=3)
    document = {"method": "linear", "models": [str(tmp_path / "a"), str(tmp_path / "b")]}
    assert recipes.plan(recipes.load(document)).notes == ()


def test_the_first_block_of_t5_stays_first(directory, make_llama, tmp_path):
    odd = make_llama()
    odd["model.layers.0.relative_attention_bias.weight"] = odd["model.norm.weight"]
    directory("a", odd, {"num_hidden_layers": 4})

    def plan(*slices):
        document = {"method": "passthrough", "slices": [{"path": "a", "layers": list(each)} for each in slices]}
        return recipes.plan(recipes.load(document, root=tmp_path))

    assert plan((0, 3), (1, 4)).outputs
    with pytest.raises(CheckpointError, match=r"layer 3 of the output is layer 0 of a, which has 'relative"):
        plan((0, 3), (0, 4))
    with pytest.raises(CheckpointError, match=r"layer 0 of the output is layer 1 of a, which lacks 'relative"):
        plan((1, 4))


@given(st.data())
def test_edits_say_of_every_layer_what_it_was(data):
    """Whatever the lists and the order, reading the new settings by the new numbers gives the old kinds."""
    depth = data.draw(st.integers(3, 6))
    numbers = st.lists(st.integers(0, depth - 1), unique=True, max_size=depth)
    section = {
        "layer_types": data.draw(st.lists(st.sampled_from("ab"), min_size=depth, max_size=depth)),
        "mlp_only_layers": data.draw(numbers),
        "decoder_sparse_step": data.draw(st.integers(1, 3)),
        "first_k_dense_replace": data.draw(st.integers(0, depth)),
    }
    order = data.draw(st.lists(st.tuples(st.just(0), st.integers(0, depth - 1)), min_size=3, max_size=8))
    kinds = Kinds([section], [depth], list(section))
    edits, impossible = kinds.edits(order)
    fewer = [key for key in section if key not in impossible]
    made = section | edits

    def sparse(section, layer):
        return layer not in section["mlp_only_layers"] and (layer + 1) % section["decoder_sparse_step"] == 0

    for k, (_, layer) in enumerate(order):
        assert made["layer_types"][k] == section["layer_types"][layer]
        assert sparse(made, k) == sparse(section, layer)
        if "first_k_dense_replace" in fewer:
            assert (k < made["first_k_dense_replace"]) == (layer < section["first_k_dense_replace"])


@given(
    st.lists(st.sampled_from("ab"), max_size=3),
    st.lists(st.sampled_from("ab"), min_size=1, max_size=3),
    st.integers(0, 30),
)
def test_a_pattern_goes_on_as_it_repeats_itself(beginning, period, place):
    whole = [*beginning, *period * 40]
    assert continue_periodically([frozenset(e) for e in whole[:30]], place) == frozenset(whole[place])


def test_a_threshold_that_cannot_be_moved_is_refused(directory, tmp_path):
    directory("a", config={"num_hidden_layers": 4, "first_k_dense_replace": 1})
    document = {"method": "passthrough", "slices": [{"path": "a", "layers": [0, 2]}, {"path": "a", "layers": [0, 2]}]}
    with pytest.raises(
        RecipeError, match=r"first_k_dense_replace: 1\), which cannot describe the layers under 'model.la"
    ):
        recipes.plan(recipes.load(document, root=tmp_path))
