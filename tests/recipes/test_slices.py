"""Layers stacked anew: names, sources and what the config says about them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from merganser import recipes
from merganser.checkpoints.base import TensorSpec
from merganser.checkpoints.sidecars import apply_edits
from merganser.engine.plan import Source
from merganser.errors import CheckpointError, RecipeError
from merganser.recipes.layer_settings import edit_layers as edits_of
from merganser.recipes.layers import Stack
from merganser.recipes.stacking import Restacked

FRANKEN = """
method: passthrough
slices:
  - {path: a, layers: [0, 3]}
  - {path: b, layers: [1, 4], scale: 0.5}
"""


def outputs(plan):
    return {output.name: output for output in plan.outputs}


def test_layers_are_renumbered_and_the_ends_come_from_the_outer_slices(hub):
    plan = recipes.plan(recipes.load(FRANKEN), hub())
    made = outputs(plan)
    assert made["model.embed_tokens.weight"].inputs == (Source(0, "model.embed_tokens.weight"),)
    assert made["lm_head.weight"].inputs == (Source(1, "lm_head.weight"),)
    assert made["model.norm.weight"].parameters == {"scale": [0.5]}
    expected = [(0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (1, 3)]
    for new, (model, old) in enumerate(expected):
        name = "model.layers.{}.mlp.up_proj.weight"
        assert made[name.format(new)].inputs == (Source(model, name.format(old)),)
    assert len(made) == 3 + 6 * 5
    order = [output.name for output in plan.outputs]
    assert order[0] == "model.embed_tokens.weight"
    assert order[-2:] == ["model.norm.weight", "lm_head.weight"]


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 5), st.integers(1, 6)), min_size=1, max_size=5),
    st.sampled_from(["native", "mergekit"]),
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_stacking_is_the_concatenation_of_its_slices(hub, parts, dialect):
    parts = [(model, first, min(6, first + count)) for model, first, count in parts]
    if dialect == "native":
        slices = [{"path": model, "layers": [first, last]} for model, first, last in parts]
        document = {"method": "passthrough", "slices": slices}
    else:
        slices = [{"sources": [{"model": model, "layer_range": [first, last]}]} for model, first, last in parts]
        document = {"merge_method": "passthrough", "slices": slices}
    plan = recipes.plan(recipes.load(document), hub(layers=6))
    labels = [model.label for model in plan.models]
    found = [
        (labels[o.inputs[0].model], int(o.inputs[0].name.split(".")[2])) for o in plan.outputs if ".up_proj." in o.name
    ]
    assert found == [(model, layer) for model, first, last in parts for layer in range(first, last)]


def test_slices_of_several_models_and_their_gradients(hub):
    text = """
method: slerp
base: a
slices:
  - models: [{path: a, layers: [0, 3]}, {path: b, layers: [1, 4]}]
    parameters: {t: [0, 1]}
  - models: [{path: c, layers: [0, 1]}, {path: a, layers: [3, 4]}]
parameters: {t: 0.25}
"""
    made = outputs(recipes.plan(recipes.load(text), hub()))
    name = "model.layers.{}.mlp.up_proj.weight"
    assert [made[name.format(i)].parameters["t"] for i in range(4)] == [0, 0.5, 1, 0.25]
    assert made[name.format(1)].base == Source(0, name.format(1))
    assert made[name.format(1)].inputs == (Source(1, name.format(2)),)
    # The base is the second entry of its slice here, with layers of its own.
    assert made[name.format(3)].base == Source(0, name.format(3))
    assert made[name.format(3)].inputs == (Source(2, name.format(0)),)


def test_a_slice_of_the_base_alone_is_copied(hub):
    document = {
        "merge_method": "ties",
        "base_model": "base",
        "slices": [
            {"sources": [{"model": "base", "layer_range": [0, 1]}]},
            {"sources": [{"model": "a", "layer_range": [1, 4]}, {"model": "base", "layer_range": [1, 4]}]},
        ],
        "parameters": {"weight": 1.0},
    }
    made = outputs(recipes.plan(recipes.load(document), hub()))
    assert made["model.layers.0.mlp.up_proj.weight"].method == "passthrough"
    assert made["model.layers.1.mlp.up_proj.weight"].method == "ties"


def test_a_model_without_layers_cannot_be_sliced(header):
    with pytest.raises(CheckpointError, match="a has no run of numbered layers"):
        recipes.plan(
            recipes.load("method: passthrough\nslices: [{path: a, layers: [0, 1]}]"),
            lambda reference: header(reference, {"w": TensorSpec((1,), torch.float32)}),
        )


def test_a_tensor_lost_between_layers_is_an_error(header, make_llama):
    def opener(reference):
        extra = {"model.layers.2.mlp.gate.weight": TensorSpec((2,), torch.float32)} if reference == "b" else {}
        return header(reference, make_llama() | extra)

    text = "method: nuslerp\nslices: [{models: [{path: a, layers: [0, 2]}, {path: b, layers: [%d, %d]}]}]"
    with pytest.raises(CheckpointError, match=r"b has 'model.layers.2.mlp.gate.weight', which a does not have"):
        recipes.plan(recipes.load(text % (1, 3)), opener)
    assert recipes.plan(recipes.load(text % (0, 2)), opener).outputs


def test_layers_of_one_model_are_compared_like_those_of_several(hub, header, make_llama):
    text = "method: nuslerp\nslices: [{models: [{path: a, layers: [0, 2]}, {path: a, layers: [%d, %d]}]}]"
    with pytest.raises(RecipeError, match=r"slices\[0\]: .* equally many layers, got 2 from a, 3 from a"):
        recipes.plan(recipes.load(text % (1, 4)), hub())
    wide = {"model.layers.3.mlp.up_proj.weight": TensorSpec((16, 8), torch.float32)}
    with pytest.raises(CheckpointError) as error:
        recipes.plan(recipes.load(text % (2, 4)), lambda reference: header(reference, make_llama() | wide))
    assert "[8, 8] in a, [16, 8] in 'model.layers.3.mlp.up_proj.weight' of a" in str(error.value)


def test_a_nested_stack_passes_its_config_on(directory, tmp_path):
    config = {"num_hidden_layers": 4}
    for name in "ab":
        directory(name, config=config)
    (tmp_path / "stage.yml").write_text(FRANKEN)
    (tmp_path / "recipe.yml").write_text(
        "method: slerp\nparameters: {t: 0.5}\nmodels: [stage.yml, {recipe: stage.yml, label: c}]"
    )
    plan = recipes.plan(recipes.load(tmp_path / "recipe.yml"))
    assert apply_edits(config, plan.sidecars.config) == {"num_hidden_layers": 6}
    again = FRANKEN.replace("path: a, layers: [0, 3]", "recipe: stage.yml, layers: [1, 6]")
    (tmp_path / "again.yml").write_text(again)
    plan = recipes.plan(recipes.load(tmp_path / "again.yml"))
    assert apply_edits(config, plan.sidecars.config) == {"num_hidden_layers": 8}


def restacked(prefix="model.layers", old=4, order=(0, 1, 2, 1, 2, 3)):
    return [Restacked(Stack(prefix, "", tuple(range(old)), 10), tuple((0, i) for i in order), (old,))]


def layer_edits(config, restacked):
    return edits_of([config], restacked)


@pytest.mark.parametrize("key", ["num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth"])
def test_the_count_is_whichever_key_says_it(key):
    config = {key: 4, "hidden_size": 4, "num_attention_heads": 4, "max_window_layers": 4}
    edits, notes = layer_edits(config, restacked())
    assert apply_edits(config, edits) == config | {key: 6}
    assert not notes


def test_lists_with_an_entry_a_layer_are_taken_along():
    config = {"num_hidden_layers": 4, "layer_types": list("abcd"), "rope_scaling": [1, 2, 3, 4]}
    edits, _ = layer_edits(config, restacked())
    assert apply_edits(config, edits)["layer_types"] == list("abcbcd")
    assert apply_edits(config, edits)["rope_scaling"] == [1, 2, 3, 4]


def test_the_config_of_the_right_tower_is_changed():
    config = {"text_config": {"num_hidden_layers": 4}, "vision_config": {"num_hidden_layers": 4, "depth": 2}}
    edits, _ = layer_edits(config, restacked("vision_tower.layers"))
    assert apply_edits(config, edits)["text_config"]["num_hidden_layers"] == 4
    assert apply_edits(config, edits)["vision_config"]["num_hidden_layers"] == 6
    edits, _ = layer_edits(config, restacked("language_model.layers"))
    assert apply_edits(config, edits)["text_config"]["num_hidden_layers"] == 6


def test_the_halves_of_an_encoder_decoder_may_have_a_section_each():
    config = {half: {"model_type": "t5gemma_module", "num_hidden_layers": 4} for half in ("encoder", "decoder")}
    edits, notes = layer_edits(config, restacked("model.decoder.layers"))
    assert apply_edits(config, edits)["decoder"]["num_hidden_layers"] == 6
    assert apply_edits(config, edits)["encoder"]["num_hidden_layers"] == 4
    assert not notes


@pytest.mark.parametrize("module", [None, "text_decoder", "vision_tower"])
def test_slices_are_of_the_language_model_however_many_tensors_another_part_has(module, header, make_llama):
    text = {f"language_model.{name}": spec for name, spec in make_llama().items()}
    sizes = {f"vision_tower.blocks.{i}.w{k}": TensorSpec((2,), torch.float32) for i in range(4) for k in range(20)}
    slices = [{"path": "a", "layers": [0, 4]}, {"path": "b", "layers": [2, 4]}]
    recipe = {"slices": slices} if module is None else {"modules": {module: {"slices": slices}}}
    plan = recipes.plan(
        recipes.load({"method": "passthrough", **recipe}), lambda reference: header(reference, text | sizes)
    )
    sliced = (
        "vision_tower.blocks.5.w0" if module == "vision_tower" else "language_model.model.layers.5.mlp.up_proj.weight"
    )
    made = outputs(plan)
    assert made[sliced].inputs == (Source(1, sliced.replace(".5.", ".3.")),)
    assert len([name for name in made if ".5." in name]) == (20 if module == "vision_tower" else 5)
    said = [note for note in plan.notes if "the slices are layers of 'language_model.model.layers'" in note]
    assert len(said) == (module is None)


BART = {"encoder_layers": 4, "decoder_layers": 4, "num_hidden_layers": 4, "is_encoder_decoder": True}
T5 = {"num_layers": 4, "num_decoder_layers": 4, "is_encoder_decoder": True}
T5_SHORT = {"num_layers": 4, "is_encoder_decoder": True}


@pytest.mark.parametrize(
    ("config", "prefix", "changed"),
    [
        (BART, "model.encoder.layers", {"encoder_layers": 6, "num_hidden_layers": 6}),
        (BART, "model.decoder.layers", {"decoder_layers": 6}),
        (T5, "encoder.block", {"num_layers": 6}),
        (T5, "decoder.block", {"num_decoder_layers": 6}),
        (T5_SHORT, "encoder.block", {"num_layers": 6, "num_decoder_layers": 4}),
        (T5_SHORT, "decoder.block", {"num_decoder_layers": 6}),
        ({"num_hidden_layers": 4}, "model.decoder.layers", {"num_hidden_layers": 6}),
        ({"num_hidden_layers": 4}, "bert.encoder.layer", {"num_hidden_layers": 6}),
    ],
)
def test_the_other_half_of_an_encoder_decoder_stays(config, prefix, changed):
    edits, notes = layer_edits(config, restacked(prefix))
    assert apply_edits(config, edits) == config | changed
    assert not notes


def test_both_halves_may_change_and_one_without_a_count_is_noted():
    for order in (("encoder.block", "decoder.block"), ("decoder.block", "encoder.block")):
        edits, _ = layer_edits(T5_SHORT, [*restacked(order[0]), *restacked(order[1])])
        assert apply_edits(T5_SHORT, edits) == T5 | {"num_layers": 6, "num_decoder_layers": 6}
    edits, notes = layer_edits({"encoder_layers": 4, "is_encoder_decoder": True}, restacked("decoder.layers"))
    assert not edits
    assert "set the number of layers to 6 there by hand" in notes[0]


def test_a_count_nobody_says_is_a_note_and_no_change_none():
    edits, notes = layer_edits({"hidden_size": 8}, restacked())
    assert not edits
    assert "set the number of layers to 6 there by hand" in notes[0]
    assert layer_edits({"num_hidden_layers": 4}, restacked(order=range(4))) == ([], [])


def test_the_plan_carries_the_edits(directory, tmp_path):
    config = {"num_hidden_layers": 4, "torch_dtype": "float32", "quantization_config": {"bits": 4}}
    for name in "ab":
        directory(name, config=config)
    (tmp_path / "recipe.yml").write_text(FRANKEN + "output: {dtype: bfloat16}\n")
    plan = recipes.plan(recipes.load(tmp_path / "recipe.yml"))
    assert apply_edits(config, plan.sidecars.config) == {"num_hidden_layers": 6, "torch_dtype": "bfloat16"}
