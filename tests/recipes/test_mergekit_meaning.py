"""A recipe in mergekit's dialect means what it means there, or the plan says otherwise."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from merganser import recipes
from merganser.checkpoints.sidecars import apply_edits
from merganser.errors import RecipeError
from merganser.methods.registry import aliases, lookup, mergekit_defaults, parameters
from merganser.recipes import mergekit
from merganser.recipes.mergekit_parameters import ACTING, KNOWN, explain_no_effect

MODELS = [{"model": "a", "parameters": {"weight": 0.25}}, {"model": "b", "parameters": {"weight": 0.75}}]


def every_name(method):
    """What a recipe could call a parameter of a method: here, there, or anywhere in mergekit."""
    return sorted({*parameters(lookup(method)), *aliases(lookup(method)), *KNOWN})


@pytest.mark.parametrize(
    ("method", "name"),
    [(method, name) for method in ACTING for name in every_name(method) if name not in ("weight", "t")],
)
def test_a_parameter_acts_if_it_acts_in_mergekit_and_is_noted_if_not(method, name):
    kind = parameters(lookup(method)).get(aliases(lookup(method)).get(name, name))
    value = True if kind is not None and kind.kind is bool else "tensor" if name == "scope" else 1
    document = {"merge_method": method, "base_model": "base", "models": MODELS, "parameters": {name: value}}
    recipe = recipes.load(document)
    noted = any(note.startswith(f"parameters.{name} has no effect: ") for note in recipe.notes)
    defaults = mergekit_defaults(lookup(method))
    assert (recipe.parameters != defaults or name in defaults) == (name in ACTING[method])
    assert noted == (name not in ACTING[method])


@pytest.mark.parametrize(
    ("method", "name", "value", "reason"),
    [
        ("karcher", "weight", 0.5, "mergekit's 'karcher' has no such parameter; it has an effect in a native recipe"),
        ("ties", "scale", 0.5, "in this dialect it is called 'lambda'"),
        ("ties", "scope", "global", "mergekit's 'ties' has no such parameter"),
        ("sce", "lambda", 0.5, "mergekit's 'sce' has no such parameter"),
        ("multislerp", "epsilon", 0.5, "in this dialect it is called 'eps'"),
        ("linear", "lambda", 0.5, "method 'linear' does not use it"),
        ("linear", "embed_slerp", True, "it belongs to an older mergekit"),
    ],
)
def test_the_note_says_why(method, name, value, reason):
    document = {"merge_method": method, "base_model": "base", "models": [{"model": "a"}], "parameters": {name: value}}
    notes = recipes.load(document).notes
    assert any(f"parameters.{name} has no effect: {reason}" in note for note in notes)


def test_methods_of_our_own_take_all_their_parameters():
    recipe = recipes.load(
        {"merge_method": "tsv", "base_model": "base", "models": MODELS, "parameters": {"scale": 0.5, "low_rank": True}}
    )
    assert recipe.parameters == {"scale": 0.5, "low_rank": True}
    assert not recipe.notes
    assert explain_no_effect("scope", "tsv", lookup("tsv")) is None


def test_a_filter_list_without_a_default_is_refused_where_a_weight_is_needed(hub):
    own = {"weight": [{"filter": "mlp", "value": 0.5}]}
    document = {"merge_method": "linear", "models": [{"model": "a", "parameters": own}, MODELS[1]]}
    with pytest.raises(RecipeError, match=r"tensor 'model.embed_tokens.weight' and 14 more: weight of a has no"):
        recipes.plan(recipes.load(document), hub())
    document["parameters"] = {"weight": 0.5}
    plan = recipes.plan(recipes.load(document), hub())
    assert plan.outputs[0].parameters["weight"] == [0.5, 0.75]
    optional = {"merge_method": "ties", "base_model": "base", "models": MODELS}
    optional["parameters"] = {"density": [{"filter": "mlp", "value": 0.5}]}
    assert recipes.plan(recipes.load(optional), hub()).outputs[0].parameters["density"] == [1.0, 1.0]


@pytest.mark.parametrize("method", ["linear", "ties", "nuslerp", "multislerp", "della"])
def test_a_weight_left_out_is_noted(method, hub):
    models = [{"model": "a"}, {"model": "b", "parameters": {"weight": 0.75}}]
    document = {"merge_method": method, "models": models}
    document |= {"base_model": "base"} if method in ("ties", "della") else {}
    notes = recipes.plan(recipes.load(document), hub()).notes
    assert "models: weight is not given for a; 1 is used (mergekit would refuse)" in notes
    native = {"method": method, "models": ["a", "b"]} | ({"base": "base"} if "base_model" in document else {})
    assert not recipes.plan(recipes.load(native), hub()).notes


@pytest.mark.parametrize(
    ("dialect", "dtypes", "made"),
    [
        ("mergekit", ("bfloat16", "float32"), "float32"),
        ("mergekit", ("float16", "bfloat16"), "float32"),
        ("native", ("bfloat16", "float32"), "bfloat16"),
        ("native", ("float32", "bfloat16"), "float32"),
    ],
)
def test_dtypes_that_differ_are_noted(dialect, dtypes, made, directory, make_llama, tmp_path):
    for name, dtype in zip(("base", "a"), dtypes, strict=True):
        directory(name, make_llama(dtype=getattr(torch, dtype)), {"torch_dtype": dtype})
    document = {
        "mergekit": {"merge_method": "ties", "base_model": "base", "models": [MODELS[0]]},
        "native": {"method": "ties", "base": "base", "models": ["a"]},
    }[dialect]
    plan = recipes.plan(recipes.load(document, root=tmp_path))
    assert {str(output.spec.dtype) for output in plan.outputs} == {f"torch.{made}"}
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    assert apply_edits(config, plan.sidecars.config) == {"torch_dtype": made}
    key = "dtype" if dialect == "mergekit" else "output.dtype"
    other = [name for name, dtype in zip(("base", "a"), dtypes, strict=True) if dtype != made]
    noted = [
        note for note in plan.notes if note.endswith(f"since the recipe does not choose a dtype; set {key} to choose")
    ]
    assert sorted(note.split(" is stored in ")[0] for note in noted) == sorted(other)
    said = {"dtype": "float16"} if dialect == "mergekit" else {"output": {"dtype": "float16"}}
    assert not recipes.plan(recipes.load(document | said, root=tmp_path)).notes


@pytest.mark.parametrize(
    ("top", "note"),
    [
        ({"int8_mask": True}, "int8_mask has no effect at the top of a recipe: masks take no memory here"),
        (
            {"pad_to_multiple_of": 64},
            "pad_to_multiple_of has no effect at the top of a recipe: it belongs under tokenizer",
        ),
        ({"normalize": True}, "normalize has no effect at the top of a recipe: it belongs under parameters"),
        ({"density": 0.5}, "density has no effect at the top of a recipe: method 'linear' does not use it"),
        ({"embed_slerp": True}, "embed_slerp has no effect at the top of a recipe: it belongs to an older mergekit"),
        ({"random_seed": 0}, "random_seed has no effect at the top of a recipe: mergekit reads it from its command"),
    ],
)
def test_keys_of_other_places_are_noted(top, note):
    notes = recipes.load({"merge_method": "linear", "models": MODELS, **top}).notes
    assert len(notes) == 1
    assert notes[0].startswith(note)


def test_anchors_have_a_place_of_their_own():
    text = "x-shared: &shared {weight: 0.5}\nmerge_method: linear\nmodels:\n"
    text += " - {model: a, parameters: *shared}\n - {model: b, parameters: {<<: *shared}}\n"
    recipe = recipes.load(text)
    assert [entry.parameters for entry in recipe.entries()] == [{"weight": 0.5}] * 2
    assert recipes.load("x-paths: [&a ./a, &b ./b]\nmethod: linear\nmodels: [*a, *b]").method == "linear"
    with pytest.raises(RecipeError, match="unknown key 'y-shared'"):
        recipes.load("y-shared: 1\n" + text)


@given(st.floats(-1e6, 1e6), st.booleans(), st.integers(0, 99), st.integers(1, 99))
def test_numbers_and_truth_values_may_be_in_quotes(weight, normalize, first, count):
    document = {
        "merge_method": "linear",
        "slices": [{"sources": [{"model": "a", "layer_range": [float(first), f"{first + count}"]}]}],
        "parameters": {"weight": repr(weight), "normalize": str(normalize)},
    }
    recipe = recipes.load(document)
    assert recipe.parameters == {"weight": weight, "normalize": normalize}
    assert recipe.parts[0].slices[0].models[0].layers == (first, first + count)


@pytest.mark.parametrize("value", ["0.6x", "", "nan", "1 2", "0x10", "yes please", "1_000"])
def test_other_texts_are_no_numbers(value):
    with pytest.raises(RecipeError, match=r"parameters.weight: expected a number"):
        recipes.load({"merge_method": "linear", "models": MODELS, "parameters": {"weight": value}})


@pytest.mark.parametrize("layers", [[0.5, 2], [0, "2.5"], [0, True], ["a", 2], [0, float("inf")]])
def test_other_layers_are_refused(layers):
    document = {"merge_method": "passthrough", "slices": [{"sources": [{"model": "a", "layer_range": layers}]}]}
    with pytest.raises(RecipeError, match=r"slices\[0\].sources\[0\].layer_range"):
        recipes.load(document)


@pytest.mark.parametrize("text", ["merge_method: moe\nbase_model: a", "merge_method: moe\nmodels: [{model: a}]"])
def test_a_mixture_of_experts_is_called_one(text):
    with pytest.raises(RecipeError, match=r"a mixture-of-experts configuration \(mergekit-moe\), not a merge"):
        recipes.load(text + "\n")


def test_a_method_that_computes_more_precisely_is_noted():
    translated = mergekit.translate({"merge_method": "arcee_fusion", "models": [{"model": "a"}], "base_model": "b"}, {})
    assert any("computed in float64" in note for note in translated.notes)
    assert not mergekit.translate({"merge_method": "linear", "models": [{"model": "a"}]}, {}).notes
