"""Models that tie their head to the embedding, merged with models that have a head of their own."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

import merganser as mg
from merganser.errors import CheckpointError
from merganser.recipes import load, prepare

EMBEDDING, HEAD, OTHER = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
TIED = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": True}
UNTIED = TIED | {"tie_word_embeddings": False}


@pytest.fixture
def model(checkpoint):
    def write(name, head=None, config=TIED):
        tensors = {EMBEDDING: torch.randn(70, 16), OTHER: torch.randn(16)}
        if head is not None:
            tensors[HEAD] = tensors[EMBEDDING].clone() if head == "repeated" else torch.randn(70, 16)
        return checkpoint(name, tensors, json.dumps(config))

    return write


def heads(*paths):
    """Return the head of every model: the embedding where none is stored."""
    return [mg.open(path)[HEAD] if HEAD in mg.open(path) else mg.open(path)[EMBEDDING] for path in paths]


def tie(out):
    return json.loads((out / "config.json").read_text())["tie_word_embeddings"]


@pytest.mark.parametrize("first", [{}, {"head": "repeated"}, {"head": "own"}, {"head": "own", "config": UNTIED}])
@pytest.mark.parametrize("second", [{}, {"head": "repeated"}, {"head": "own"}, {"head": "own", "config": UNTIED}])
def test_a_head_of_its_own_is_merged_and_the_config_says_so(model, tmp_path, first, second):
    a, b = model("a", **first), model("b", **second)
    out = mg.run({"method": "linear", "models": [str(a), str(b)]}, tmp_path / "out")
    merged, (one, two) = mg.open(out), heads(a, b)
    own = "own" in (first.get("head"), second.get("head"))
    torch.testing.assert_close(merged[EMBEDDING], (mg.open(a)[EMBEDDING] + mg.open(b)[EMBEDDING]) / 2)
    torch.testing.assert_close(heads(out)[0], (one + two) / 2)
    assert tie(out) is not own


def test_task_vectors_of_a_separate_head_start_at_the_tied_embedding(model, tmp_path):
    base, a, b = model("base"), model("a", "own", UNTIED), model("b")
    recipe = {"method": "task_arithmetic", "base": str(base), "models": [str(a), str(b)], "parameters": {"scale": 0.5}}
    out = mg.run(recipe, tmp_path / "out")
    start, one, two = heads(base, a, b)
    torch.testing.assert_close(mg.open(out)[HEAD], start + 0.5 * ((one - start) + (two - start)))
    assert tie(out) is False


def test_an_override_that_takes_a_head_unties_the_config(model, tmp_path):
    a, b = model("a"), model("b", "own", UNTIED)
    recipe = {"method": "linear", "models": [str(a)], "overrides": [{"match": HEAD, "model": str(b)}]}
    out = mg.run(recipe | {"models": [str(a), str(b)]}, tmp_path / "out")
    assert torch.equal(mg.open(out)[HEAD], mg.open(b)[HEAD])
    assert tie(out) is False


def test_a_head_can_still_be_left_out(model, tmp_path):
    a, b = model("a"), model("b", "own", UNTIED)
    recipe = {"method": "linear", "models": [str(a), str(b)], "output": {"exclude": [HEAD]}}
    out = mg.run(recipe, tmp_path / "out")
    assert HEAD not in mg.open(out)
    assert tie(out) is True


def test_the_plan_says_where_a_head_comes_from(model):
    a, b, c = model("a"), model("b", "own", UNTIED), model("c", "own")
    notes = prepare(load({"method": "linear", "models": [str(a), str(b), str(c)]})).plan.notes
    assert any("separate 'lm_head.weight'" in note and str(a) in note and str(b) in note for note in notes)
    assert any(str(c) in note and "their weights differ" in note for note in notes)


def test_an_adapter_over_a_model_with_two_weights(model, tmp_path):
    """The config of the output is corrected also where the base is read through a view."""
    base = model("base", "own")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["lm_head"], "task_type": "CAUSAL_LM"}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    factors = {"lora_A": torch.randn(2, 16), "lora_B": torch.randn(70, 2)}
    stored = {f"base_model.model.lm_head.{side}.weight": factor for side, factor in factors.items()}
    save_file(stored, adapter / "adapter_model.safetensors")
    out = mg.save(f"{base}+{adapter}", tmp_path / "out")
    torch.testing.assert_close(mg.open(out)[HEAD], mg.open(base)[HEAD] + factors["lora_B"] @ factors["lora_A"])
    assert torch.equal(mg.open(out)[EMBEDDING], mg.open(base)[EMBEDDING])
    assert tie(out) is False


def test_an_expert_of_a_library_over_a_tied_base(model, tmp_path):
    base, expert = model("base"), model("expert", "own", UNTIED)
    library = mg.library.Library.build(base, {"expert": expert}, tmp_path / "lib", rank_fraction=1.0)
    out = library.extract("expert", tmp_path / "out")
    torch.testing.assert_close(mg.open(out)[HEAD], mg.open(expert)[HEAD])
    assert tie(tmp_path / "out") is False


def test_heads_of_encoder_decoders_stay_tied(model):
    """Decoders of T5 scale the input of a tied head: separate weights would compute something else."""
    a, b = model("a", config=TIED | {"is_encoder_decoder": True}), model("b", "own", UNTIED)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        prepare(load({"method": "linear", "models": [str(a), str(b)]}))
