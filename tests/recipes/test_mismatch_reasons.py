"""Everything wrong is said at once, and many tensors with one reason are one line."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from merganser import recipes
from merganser.checkpoints.base import TensorSpec
from merganser.errors import CheckpointError, InputError, RecipeError


def refusal(document, opener=None, **how):
    planned = lambda: recipes.plan(recipes.load(document, **how), *([opener] if opener else []))  # noqa: E731
    with pytest.raises(InputError) as error:
        planned()
    return str(error.value)


FAULTS = {
    "merge_method": ("merge_method: tise", "merge_method: unknown method 'tise'; did you mean 'ties'?"),
    "dtype": ("dtype: float17", "dtype: unknown dtype 'float17'"),
    "key": ("paramters: {}", "unknown key 'paramters'; did you mean 'parameters'?"),
    "tokenizer": ("tokenizer: {pad_to_multiple_of: 0}", "tokenizer.pad_to_multiple_of: expected 1 to 65536, got 0"),
    "exclude": ("exclude: 3", "exclude: expected a glob"),
    "chat_template": ("chat_template: 3", "chat_template: expected text, got 3"),
    "layers": ("", "slices[0].sources[0].layer_range: [3, 1] contains no layer"),
    "entry": ("", "slices[1].sources[0]: names no model"),
    "entry's layers": (
        "",
        "slices[1].sources[0].layer_range: expected [first, last) as two whole numbers, got nothing",
    ),
    "missing": ("", "slices[0].sources[0].model: ./nowhere: no such file or directory"),
}


def test_ten_faults_in_a_recipe_are_ten_lines(tmp_path):
    text = "slices:\n - sources: [{model: ./nowhere, layer_range: [3, 1]}]\n - sources: [{}]\n"
    text += "\n".join(line for line, _ in FAULTS.values())
    message = refusal(text)
    assert message.splitlines()[0] == f"recipe: {len(FAULTS)} problems"
    for _, said in FAULTS.values():
        assert said in message


@given(st.sets(st.sampled_from(["seed", "dtype", "method", "key", "layers", "template", "shard", "match"])))
def test_any_set_of_faults_is_reported_whole(faults):
    document = {
        "method": "lineer" if "method" in faults else "linear",
        "slices": [{"path": "a/a", "layers": [1, 0] if "layers" in faults else [0, 1]}],
        "output": {"dtype": "no" if "dtype" in faults else "float32"},
        "seed": "x" if "seed" in faults else 0,
    }
    document["output"] |= {"chat_template": 1} if "template" in faults else {}
    document["output"] |= {"shard_size": -1} if "shard" in faults else {}
    document |= {"keey": 1} if "key" in faults else {}
    document |= {"overrides": [{"model": "a/a"}]} if "match" in faults else {}
    if not faults:
        recipes.load(document)
        return
    with pytest.raises(RecipeError) as error:
        recipes.load(document)
    lines = str(error.value).splitlines()
    assert len(lines) == (1 if len(faults) == 1 else 1 + len(faults))


def test_every_missing_model_is_named(tmp_path):
    message = refusal("method: ties\nbase: ./base\nmodels: [./a, ./b, ./a]", root=tmp_path)
    assert message.splitlines()[0] == "3 problems"
    for place in ("base: ./base", "models[0]: ./a", "models[1]: ./b"):
        assert f"{place}: no such file or directory" in message


def test_missing_models_of_nested_recipes_are_named_too(tmp_path):
    inner = {"method": "linear", "models": ["./c", "./d"]}
    message = refusal({"method": "linear", "models": ["./a", {"recipe": inner}]}, root=tmp_path)
    assert all(f"./{name}: no such" in message for name in "acd")


def test_every_slice_that_asks_for_too_much_is_named(hub):
    slices = [{"path": name, "layers": [0, 9 + i]} for i, name in enumerate("abc")]
    message = refusal({"method": "passthrough", "slices": slices}, hub(layers=10))
    assert "slices[2]: asks for layers [0, 11] of c, which has 10 (0 to 9)" in message
    slices[0]["layers"] = [0, 20]
    message = refusal({"method": "passthrough", "slices": slices}, hub(layers=10))
    assert message.splitlines()[0] == "2 problems"


def test_the_models_and_the_vocabulary_are_judged_together(directory, make_llama, tmp_path):
    directory("a")
    directory("b", make_llama(layers=3))
    message = refusal("method: linear\nmodels: [a, b]\noutput: {tokenizer: union}\nseed: 1", root=tmp_path)
    assert "a has no tokenizer.json" in message


@pytest.mark.parametrize("base", ["deep", "shallow"])
def test_layers_that_are_missing_are_one_line_with_the_reason(base, header, make_llama):
    depths = {"deep": 32, "shallow": 24}
    opener = lambda reference: header(reference, make_llama(layers=depths[reference]))  # noqa: E731
    other = ({*depths} - {base}).pop()
    message = refusal({"method": "ties", "base": base, "models": [other]}, opener)
    reason = "layers 24 to 31 of deep are missing from shallow: it has "
    counts = {
        "deep": "24 layers under 'model.layers', deep 32",
        "shallow": "32 layers under 'model.layers', shallow 24; take its layers 0 to 23 with slices",
    }
    assert message == f"the checkpoints do not fit: {reason}{counts[base]}"


def test_a_pattern_over_layers_is_one_line(header, make_llama):
    biased = make_llama(32) | {
        f"model.layers.{i}.self_attn.q_proj.bias": TensorSpec((8,), torch.float32) for i in range(32)
    }
    specs = {"a": make_llama(32), "b": biased}
    opener = lambda reference: header(reference, specs[reference])  # noqa: E731
    pattern = "'model.layers.*.self_attn.q_proj.bias'"
    message = refusal({"method": "linear", "models": ["a", "b"]}, opener)
    assert message == (
        f"the checkpoints do not fit: b has {pattern} (32 tensors), which a does not have; to leave them out: "
        f"output.exclude: [{pattern}]"
    )
    recipes.plan(
        recipes.load({"method": "linear", "models": ["a", "b"], "output": {"exclude": [pattern.strip("'")]}}), opener
    )
    message = refusal({"method": "linear", "models": ["b", "a"]}, opener)
    assert message == f"the checkpoints do not fit: {pattern} (32 tensors) of b are missing from a"


def test_shapes_that_differ_alike_are_one_line_with_the_reason(directory, make_llama, tmp_path):
    directory("a", make_llama(8), {"hidden_size": 8, "architectures": ["LlamaForCausalLM"]})
    directory("b", make_llama(8, hidden=4), {"hidden_size": 4, "architectures": ["MistralForCausalLM"]})
    message = refusal("method: linear\nmodels: [a, b]\nseed: 0", root=tmp_path)
    lines = message.splitlines()
    assert len(lines) <= 5
    heading = "(b is a MistralForCausalLM, a a LlamaForCausalLM; hidden_size is 4 in b and 8 in a)"
    assert lines[0].startswith(f"the checkpoints do not fit {heading}: ")
    assert "'model.layers.0.mlp.down_proj.weight' and 31 more have unequal shapes: [8, 8] in a, [4, 4] in b" in message


def test_the_factors_of_an_adapter_are_called_that(directory, tmp_path):
    directory("a")
    factors = {
        f"base_model.model.model.layers.{i}.mlp.up_proj.lora_{side}.weight": torch.zeros(2, 8)
        for i in range(32)
        for side in "AB"
    }
    save_file(factors, tmp_path / "adapter.safetensors")
    with pytest.raises(CheckpointError) as error:
        recipes.plan(recipes.load("method: linear\nmodels: [a, adapter.safetensors]", root=tmp_path))
    assert len(str(error.value).splitlines()) == 1
    assert "adapter.safetensors holds the factors of a LoRA adapter, not weights" in str(error.value)


def test_a_value_refused_for_many_tensors_is_one_line(hub):
    message = refusal({"method": "linear", "models": ["a", "b"], "parameters": {"weight": 0.0}}, hub())
    assert len(message.splitlines()) == 1
    assert "tensor 'model.embed_tokens.weight' and 22 more: " in message
