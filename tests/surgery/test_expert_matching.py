"""Experts that were shuffled come back to their places, and the model computes what it did."""

import json
import pickle

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import merganser as mg
from merganser.cli import build
from merganser.engine.nested import reopen
from merganser.errors import InputError

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
}
TOKENS = torch.arange(16).reshape(2, 8)


def mixture(transformers, kind, seed=0):
    torch.manual_seed(seed)
    if kind == "mixtral":
        return transformers.MixtralForCausalLM(transformers.MixtralConfig(num_local_experts=5, **SIZES)).eval()
    more = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "head_dim": 8}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**more, **SIZES)).eval()


def shuffled(model, seed, noise=0.0):
    """A copy with the experts of every layer in another order, by the module's own fused weights; the orders."""
    import copy

    other, orders = copy.deepcopy(model), []
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += noise * parameter.std() * torch.randn(parameter.shape, generator=generator)
        for layer in other.model.layers:
            orders.append(torch.randperm(len(layer.mlp.gate.weight), generator=generator))
            for weight in (layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj, layer.mlp.gate.weight):
                weight.copy_(weight[orders[-1]].clone())
    return other, orders


@pytest.fixture(params=["mixtral", "qwen3"])
def pair(request, tmp_path):
    transformers = pytest.importorskip("transformers")
    model = mixture(transformers, request.param)
    other, orders = shuffled(model, 3, noise=0.3)
    model.save_pretrained(tmp_path / "a")
    other.save_pretrained(tmp_path / "b")
    return tmp_path, other, orders


def check(out, other, orders):
    """The experts are back, in a model that computes what the shuffled one does."""
    import transformers

    again = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    torch.testing.assert_close(again(TOKENS).logits, other(TOKENS).logits, atol=1e-5, rtol=1e-5)
    for mine, theirs, order in zip(again.model.layers, other.model.layers, orders, strict=True):
        assert torch.equal(mine.mlp.experts.down_proj[order], theirs.mlp.experts.down_proj)
        assert torch.equal(mine.mlp.gate.weight[order], theirs.mlp.gate.weight)


def test_experts_stored_one_by_one(pair):
    place, other, orders = pair
    view = mg.surgery.match_experts(place / "b", place / "a")
    for order, found in zip(orders, view.orders.values(), strict=True):
        np.testing.assert_array_equal(found, np.argsort(order.numpy()))
    name = next(name for name in view.names() if "experts.1" in name)
    assert torch.equal(view.read(name, (1, 3)), view[name][1:3])
    check(mg.save(view, place / "out"), other, orders)


def test_fused_experts_and_a_mixed_pair(pair):
    """The reference stored as the module has it, fused; the other one by one."""
    place, other, orders = pair
    import transformers

    reference = transformers.AutoModelForCausalLM.from_pretrained(place / "a", dtype=torch.float32)
    (place / "fused").mkdir()
    save_file({n: t.contiguous() for n, t in reference.state_dict().items()}, place / "fused/model.safetensors")
    (place / "fused/config.json").write_text((place / "a/config.json").read_text())
    (place / "both").mkdir()
    save_file({n: t.contiguous() for n, t in other.state_dict().items()}, place / "both/model.safetensors")
    (place / "both/config.json").write_text((place / "a/config.json").read_text())
    for model in ("both", "b"):
        view = mg.surgery.match_experts(place / model, place / "fused")
        for order, found in zip(orders, view.orders.values(), strict=True):
            np.testing.assert_array_equal(found, np.argsort(order.numpy()))
        fused = next(name for name in view.names() if name.endswith("experts.down_proj"))
        assert torch.equal(view.read(fused, (1, 3)), view[fused][1:3])
        assert torch.equal(view[fused][orders[0]], other.state_dict()[fused])


def test_the_command_and_a_merge_of_matched_experts(pair):
    place, other, orders = pair
    words = ["match-experts", str(place / "b"), "--to", str(place / "a"), str(place / "out"), "--json"]
    result = CliRunner().invoke(build(), words)
    assert result.exit_code == 0, result.output
    assert len(json.loads(result.stdout.splitlines()[0])["orders"]) == 2
    check(place / "out", other, orders)
    a, b, out = (load_file(place / name / "model.safetensors") for name in ("a", "b", "out"))
    apart = [sum(float((one[n] - a[n]).square().sum()) for n in a) for one in (b, out)]
    assert apart[1] < 0.3 * apart[0]


def test_what_cannot_be_matched_is_refused(tmp_path, llama):
    transformers = pytest.importorskip("transformers")
    mixture(transformers, "mixtral").save_pretrained(tmp_path / "a")
    mixture(transformers, "qwen3").save_pretrained(tmp_path / "b")
    dense = llama("dense")
    with pytest.raises(InputError, match="has no experts to match"):
        mg.surgery.match_experts(tmp_path / "a", dense)
    with pytest.raises(InputError, match="same number of them"):
        mg.surgery.match_experts(tmp_path / "b", tmp_path / "a")
    config = json.loads((tmp_path / "b/config.json").read_text())
    (tmp_path / "b/config.json").write_text(json.dumps({**config, "n_group": 4}))
    with pytest.raises(InputError, match=r"in groups \(n_group: 4\)"):
        mg.surgery.match_experts(tmp_path / "b", tmp_path / "a")
    save_file({"x.experts.0.w": torch.zeros(2, 2), "x.experts.1.w": torch.zeros(2, 2)}, tmp_path / "bare.safetensors")
    with pytest.raises(InputError, match="no router"):
        mg.surgery.match_experts(tmp_path / "bare.safetensors", tmp_path / "bare.safetensors")


def ernie(transformers, seed):
    """Its scores are corrected by one row of numbers beside the router, a column for each expert."""
    more = {"moe_num_experts": 5, "moe_k": 2, "moe_intermediate_size": 12, "moe_layer_start_index": 1}
    torch.manual_seed(seed)
    model = transformers.Ernie4_5_MoeForCausalLM(transformers.Ernie4_5_MoeConfig(**more, **SIZES)).eval()
    with torch.no_grad():
        for tensor in model.parameters():
            tensor += 0.1 * torch.randn_like(tensor)
        for name, tensor in model.named_buffers():
            if name.endswith("correction_bias"):
                tensor += torch.randn_like(tensor)
    return model


def test_what_corrects_scores_moves_along(tmp_path):
    transformers = pytest.importorskip("transformers")
    reference, model = (ernie(transformers, seed) for seed in (0, 3))
    for name, each in (("a", reference), ("b", model)):
        each.save_pretrained(tmp_path / name)
    view = mg.surgery.match_experts(tmp_path / "b", tmp_path / "a")
    assert any(order.tolist() != [*range(5)] for order in view.orders.values())
    again = transformers.AutoModelForCausalLM.from_pretrained(mg.save(view, tmp_path / "out")).eval()
    torch.testing.assert_close(again(TOKENS).logits, model(TOKENS).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", [(3,), (1, 3), (3, 1)])
def test_a_number_for_each_expert_of_unknown_meaning_is_refused(tmp_path, shape):
    """Left in place it would change the function."""
    experts = {f"mlp.experts.{i}.w": torch.randn(2, 2) for i in range(3)}
    tensors = {**experts, "mlp.gate.weight": torch.randn(3, 2), "mlp.shared.scale": torch.ones(3)}
    known, unknown = tmp_path / "known.safetensors", tmp_path / "unknown.safetensors"
    save_file(tensors, known)
    save_file({**tensors, "mlp.temperatures": torch.ones(shape)}, unknown)
    assert mg.surgery.match_experts(known, known).orders["mlp.experts"].tolist() == [0, 1, 2]
    with pytest.raises(InputError, match=r"'mlp\.temperatures' seems to have a number for each expert"):
        mg.surgery.match_experts(unknown, known)


def test_a_recipe_matches_experts_before_it_merges(pair):
    """One command for what matching first and merging then gives, also from its plan."""
    place = pair[0]
    matched = mg.surgery.match_experts(place / "b", place / "a")
    expected = mg.merge([place / "a", matched], method="linear")
    document = {"method": "linear", "models": [str(place / "a"), str(place / "b")], "match_experts": True}
    out = mg.run(document, place / "merged", workers=1)
    found = load_file(out / "model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    (place / "recipe.yml").write_text("expression: 0.5*x + 0.5*y\nmodels: {x: a, y: b}\nmatch_experts: true\n")
    plan = mg.recipes.plan(mg.recipes.load(place / "recipe.yml"))
    assert any("in the order of those of a" in note for note in plan.notes)
    assert [model.experts for model in plan.models] == [False, True]
    again = reopen(pickle.loads(pickle.dumps(plan)))
    name = next(name for name in matched.names() if "experts.1" in name)
    assert torch.equal(again.sources[1].read(name), matched[name])


def test_experts_of_task_vectors_are_matched_to_the_base(pair):
    """What was added to one expert is added to that expert, wherever its model keeps it."""
    place, other, orders = pair
    a, b = (load_file(place / name / "model.safetensors") for name in "ab")
    document = {"method": "task_arithmetic", "base": str(place / "a"), "models": [str(place / "b")]}
    out = mg.run({**document, "match_experts": True}, place / "moved")
    check(out, other, orders)
    plain = mg.run(document, place / "plain")
    assert all(torch.allclose(t, b[n], atol=1e-6) for n, t in load_file(plain / "model.safetensors").items())
    assert a.keys() == b.keys()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"match_experts": "yes"}, "match_experts: expected true or false"),
        ({"match_experts": True}, "has no experts to match"),
    ],
)
def test_recipes_whose_experts_cannot_be_matched(llama, more, message):
    models = [str(llama("one")), str(llama("two"))]
    with pytest.raises(InputError, match=message):
        mg.recipes.plan(mg.recipes.load({"method": "linear", "models": models, **more}))


def test_slices_are_not_matched():
    slices = [{"path": "a", "layers": [0, 1]}, {"path": "b", "layers": [0, 1]}]
    with pytest.raises(InputError, match="a recipe with slices moves layers"):
        mg.recipes.load({"method": "passthrough", "slices": slices, "match_experts": True})
