from __future__ import annotations

import contextlib
import pickle

import numpy as np
import pytest
import torch

from merganser import recipes
from merganser.checkpoints.base import TensorSpec
from merganser.engine.plan import Source
from merganser.errors import CheckpointError, RecipeError


def spec(*shape, dtype=torch.float32):
    return TensorSpec(shape, dtype)


def planned(text, models, header):
    return recipes.plan(recipes.load(text), lambda reference: header(reference, *models[reference]))


def outputs(plan):
    return {output.name: output for output in plan.outputs}


def test_a_plan_in_the_order_and_dtype_of_the_base(hub):
    text = """
method: ties
base: base
models: [{path: a, weight: 0.6}, b]
parameters: {density: 0.3}
overrides:
  - {match: "*.embed_tokens.*", method: linear}
  - {match: [lm_head.*, "*norm*"], density: 1.0}
  - {match: "*", density: 0}
seed: 7
"""
    opener = hub(dtype=torch.bfloat16)
    plan = recipes.plan(recipes.load(text), opener)
    assert [output.name for output in plan.outputs] == opener("base").names()
    assert [model.label for model in plan.models] == ["base", "a", "b"]
    made = outputs(plan)
    assert made["model.embed_tokens.weight"].method == "linear"
    assert made["model.embed_tokens.weight"].parameters == {"weight": [0.6, 1.0]}
    assert made["model.embed_tokens.weight"].base is None
    assert made["lm_head.weight"].parameters["density"] == [1.0, 1.0]
    layer = made["model.layers.0.mlp.up_proj.weight"]
    assert layer.parameters == {"weight": [0.6, 1.0], "density": [0.0, 0.0]}
    assert (layer.base, layer.inputs) == (Source(0, layer.name), (Source(1, layer.name), Source(2, layer.name)))
    assert layer.spec.dtype is torch.bfloat16
    assert plan.seed == 7
    assert pickle.loads(pickle.dumps(plan)) == plan


def test_equal_parameters_are_shared_and_every_set_is_checked(hub):
    plan = recipes.plan(recipes.load({"method": "linear", "models": ["a", "b"]}), hub(layers=30))
    assert len({id(output.parameters) for output in plan.outputs}) == 1
    gradient = {"method": "linear", "models": ["a", "b"], "parameters": {"weight": [1, 0]}}
    with pytest.raises(RecipeError, match=r"tensor 'model.layers.3.*sum to zero"):
        recipes.plan(recipes.load(gradient), hub())


def test_depth_in_the_native_dialect_is_one_after_the_layers(hub):
    text = "method: task_arithmetic\nbase: base\nmodels: [a]\nparameters: {scale: [0.2, 1.0]}"
    made = outputs(recipes.plan(recipes.load(text), hub(layers=5)))
    assert made["model.embed_tokens.weight"].parameters["scale"] == pytest.approx(0.2)
    assert made["model.layers.2.mlp.up_proj.weight"].parameters["scale"] == pytest.approx(0.6)
    assert made["lm_head.weight"].parameters["scale"] == pytest.approx(1.0)
    assert made["model.norm.weight"].parameters["scale"] == pytest.approx(1.0)


def test_a_model_that_is_listed_again_is_noted(hub):
    """It may be a slip of the pen; its task vector is added twice."""
    repeated = "is listed more than once and counts each time"
    for models, noted in (("[a, a]", True), ("[a, b]", False), ("[base, a, base]", False)):
        plan = recipes.plan(recipes.load(f"method: task_arithmetic\nbase: base\nmodels: {models}"), hub())
        assert any(repeated in note for note in plan.notes) is noted
    stacked = "method: passthrough\nslices: [{path: a, layers: [0, 2]}, {path: a, layers: [1, 3]}]"
    assert not any(repeated in note for note in recipes.plan(recipes.load(stacked), hub(layers=3)).notes)


def test_methods_that_ask_for_depth_get_it(hub):
    made = outputs(recipes.plan(recipes.load("method: lines\nbase: base\nmodels: [a]"), hub(layers=5)))
    assert [made[f"model.layers.{i}.mlp.up_proj.weight"].parameters["depth"] for i in range(5)] == [
        0,
        0.25,
        0.5,
        0.75,
        1,
    ]


def test_values_by_glob(hub):
    text = """
method: linear
models: [{path: a, weight: {"*.mlp.*": [0, 1], "lm_head.*": 3}}, b]
parameters: {weight: {"lm_head.*": 5, "*": 2}}
"""
    made = outputs(recipes.plan(recipes.load(text), hub(layers=3)))
    assert made["model.layers.1.mlp.up_proj.weight"].parameters["weight"] == [0.5, 2.0]
    assert made["model.layers.1.self_attn.q_proj.weight"].parameters["weight"] == [2.0, 2.0]
    assert made["lm_head.weight"].parameters["weight"] == [3.0, 5.0]


def test_missing_tensors_and_shapes_are_all_named(header):
    models = {
        "a": ({"w": spec(2, 3), "v": spec(4), "u": spec(1)},),
        "b": ({"w": spec(3, 3), "u": spec(1)},),
    }
    with pytest.raises(CheckpointError) as error:
        planned("method: linear\nmodels: [a, b]", models, header)
    lines = str(error.value).splitlines()
    assert lines[0] == "the checkpoints do not fit: 2 problems"
    assert (
        "'w' has unequal shapes: [2, 3] in a, [3, 3] in b; if their vocabularies differ, set output.tokenizer"
        in lines[1]
    )
    assert "'v' of a is missing from b" in lines[2]


def test_a_long_list_is_cut_and_counted(header):
    many = {"w": spec(1)} | {f"{a}{b}": spec(1) for a in "ghijk" for b in "lmnopq"}
    with pytest.raises(CheckpointError) as error:
        planned("method: linear\nmodels: [a, b]", {"a": (many,), "b": ({"w": spec(1)},)}, header)
    assert str(error.value).splitlines()[-1] == "  … and 22 more"


def test_no_hint_of_vocabularies_inside_layers(header):
    models = {"a": ({f"h.{i}.w": spec(2, 3) for i in range(2)},), "b": ({f"h.{i}.w": spec(3, 3) for i in range(2)},)}
    with pytest.raises(CheckpointError) as error:
        planned("method: linear\nmodels: [a, b]", models, header)
    assert "vocabular" not in str(error.value)


def test_a_tensor_that_would_be_lost_is_an_error_unless_excluded(header):
    models = {"base": ({"w": spec(2)},), "a": ({"w": spec(2), "head.weight": spec(3, 2)},)}
    text = "method: task_arithmetic\nbase: base\nmodels: [a]\n"
    with pytest.raises(CheckpointError) as error:
        planned(text, models, header)
    assert "a has 'head.weight', which base does not have; to leave it out: output.exclude: ['head.weight']" in str(
        error.value
    )
    plan = planned(text + "output: {exclude: 'head.*'}", models, header)
    assert [output.name for output in plan.outputs] == ["w"]


def test_an_override_may_take_a_tensor_from_one_model_only(header):
    models = {"base": ({"w": spec(2)},), "a": ({"w": spec(2), "head.weight": spec(3, 2)},), "b": ({"w": spec(2)},)}
    text = """
method: task_arithmetic
base: base
models: [a, b]
overrides: [{match: "head.*", method: passthrough, model: a}]
"""
    made = outputs(planned(text, models, header))
    assert made["head.weight"].inputs == (Source(1, "head.weight"),)
    assert made["head.weight"].method == "passthrough"
    keep = {"method": "linear", "base": "base", "models": ["a", "b"], "output": {"exclude": "head*"}}
    keep["overrides"] = [{"match": "w", "method": "passthrough"}]
    assert outputs(planned(keep, models, header))["w"].inputs == (Source(0, "w"),)


@pytest.mark.parametrize(
    ("override", "scale"),
    [({"method": "passthrough"}, None), ({"model": "a"}, None), ({"method": "passthrough", "scale": 2}, [2])],
)
def test_the_scale_of_task_vectors_does_not_scale_copies(header, override, scale):
    recipe = {
        "method": "task_arithmetic",
        "base": "base",
        "models": ["a"],
        "parameters": {"scale": 0.3},
        "overrides": [{"match": "b", **override}],
    }
    models = dict.fromkeys(("base", "a"), ({"w": spec(2), "b": spec(2)},))
    made = outputs(planned(recipe, models, header))
    assert made["w"].parameters["scale"] == 0.3
    assert made["b"].method == "passthrough"
    assert made["b"].parameters.get("scale") in (scale, [scale])


def test_integer_buffers_are_copied_from_the_base(header):
    integer = spec(4, dtype=torch.int64)
    models = {
        "base": ({"w": spec(2), "position_ids": integer, "n": spec(dtype=torch.int64)},),
        "a": ({"w": spec(2), "extra_ids": integer, "n": spec(dtype=torch.int64)},),
    }
    plan = planned("method: task_arithmetic\nbase: base\nmodels: [a]\noutput: {dtype: float16}", models, header)
    made = outputs(plan)
    assert list(made) == ["w", "position_ids", "n"]
    for name in ("position_ids", "n"):
        assert made[name].method == "passthrough"
        assert made[name].inputs == (Source(0, name),)
        assert made[name].spec.dtype is torch.int64
    assert made["w"].spec.dtype is torch.float16
    assert any("1 buffer(s) that only a has are left out, such as 'extra_ids'" in note for note in plan.notes)


def test_computed_float_buffers_need_not_be_everywhere(header):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    models = {"a": ({"w": spec(2), name: spec(4)},), "b": ({"w": spec(2)},)}
    for text, expected in (("method: linear\nmodels: [a, b]", ["w", name]), ("method: linear\nmodels: [b, a]", ["w"])):
        assert list(outputs(planned(text, models, header))) == expected


def test_quantised_weights_are_refused(header):
    models = {m: ({"layers.0.qweight": spec(4, 4, dtype=torch.int32)},) for m in "ab"}
    with pytest.raises(CheckpointError, match="a quantised weight cannot be merged"):
        planned("method: linear\nmodels: [a, b]", models, header)


def test_tied_weights_stay_tied(header):
    tied = ({"embed_tokens.weight": spec(8, 2)}, {"lm_head.weight": "embed_tokens.weight"})
    plan = planned("method: linear\nmodels: [a, b]", {"a": tied, "b": tied}, header)
    assert [output.name for output in plan.outputs] == ["embed_tokens.weight"]
    assert plan.aliases == {"lm_head.weight": "embed_tokens.weight"}


def test_a_head_of_its_own_meets_a_tied_one(header):
    own = ({"embed_tokens.weight": spec(8, 2), "lm_head.weight": spec(8, 2)},)
    lone = ({"embed_tokens.weight": spec(8, 2)},)
    plan = planned("method: linear\nmodels: [a, b]", {"a": own, "b": lone}, header)
    assert outputs(plan)["lm_head.weight"].inputs == (Source(0, "lm_head.weight"), Source(1, "embed_tokens.weight"))
    assert any("its tied embedding 'embed_tokens.weight' is used" in note for note in plan.notes)
    with pytest.raises(CheckpointError, match=r"b has 'lm_head.weight', which a does not have"):
        planned("method: linear\nmodels: [a, b]", {"a": lone, "b": own}, header)


def test_a_model_may_be_a_recipe(hub, tmp_path):
    (tmp_path / "stage.yml").write_text("method: slerp\nmodels: [x, y]\nparameters: {t: 0.5}\n")
    text = """
method: ties
base: base
models:
  - {recipe: stage.yml, weight: 0.3}
  - {recipe: {merge_method: linear, models: [{model: x}, {model: z}]}, label: soup, weight: 0.5}
  - {method: linear, models: [u, v]}
"""
    (tmp_path / "recipe.yml").write_text(text)
    plan = recipes.plan(recipes.load(tmp_path / "recipe.yml"), hub())
    assert [model.label for model in plan.models] == ["base", "stage.yml", "soup", "models[2]"]
    nested = [model.plan for model in plan.models]
    assert [inner.outputs[0].method if inner else None for inner in nested] == [None, "slerp", "linear", "linear"]
    assert plan.outputs[0].parameters["weight"] == [0.3, 0.5, 1.0]
    assert pickle.loads(pickle.dumps(plan)) == plan


def test_paths_are_found_beside_the_recipe_then_in_the_working_directory(tmp_path, directory, monkeypatch):
    beside, elsewhere = tmp_path / "recipes", tmp_path / "work"
    for folder in (beside, elsewhere):
        folder.mkdir()
    directory("recipes/a", seed=1)
    directory("work/a", seed=2)
    directory("work/b", seed=3)
    (beside / "recipe.yml").write_text("method: linear\nmodels: [a, b]\n")
    monkeypatch.chdir(elsewhere)
    plan = recipes.plan(recipes.load(beside / "recipe.yml"))
    assert [model.path for model in plan.models] == [str(beside / "a"), "b"]
    assert [model.label for model in plan.models] == ["a", "b"]


def test_a_model_nobody_needs_is_noted(hub):
    text = "method: linear\nmodels: [a, b]\noverrides: [{match: '*', method: passthrough, model: a}]"
    assert "b is not needed: no tensor comes from it" in recipes.plan(recipes.load(text), hub()).notes


def test_the_base_listed_again_is_not_counted(hub):
    plan = recipes.plan(recipes.load("method: ties\nbase: base\nmodels: [base, a]"), hub())
    assert len(plan.outputs[0].inputs) == 1
    assert any("does not also count it as a model" in note for note in plan.notes)


def test_the_base_is_known_by_its_place(directory, tmp_path, monkeypatch, hub):
    for name in ("base", "a"):
        directory(name)
    (tmp_path / "link").symlink_to(tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    for again in ("./base", str(tmp_path / "base"), "link", "a/../base"):
        text = f"method: ties\nbase: base\nmodels: [{again}, a]\noverrides: [{{match: '*norm*', model: {again}}}]"
        plan = recipes.plan(recipes.load(text))
        assert [model.label for model in plan.models] == ["base", "a"]
        assert len(plan.outputs[0].inputs) == 1
    # Names of weights that are elsewhere are no places.
    plan = recipes.plan(recipes.load("method: ties\nbase: base\nmodels: [link, a]"), hub())
    assert [model.label for model in plan.models] == ["base", "link", "a"]


def test_a_base_makes_up_the_two_models_of_a_method_without_base(hub):
    plan = recipes.plan(recipes.load("method: slerp\nbase: base\nmodels: [a]\nparameters: {t: 0.1}"), hub())
    assert plan.outputs[0].base == Source(0, plan.outputs[0].name)


@pytest.mark.parametrize("lacking", [0, 2])
def test_planning_asks_each_header_a_bounded_number_of_times(header, lacking):
    """Linear in the number of tensors, also of those that are missing: twice the tensors, twice the questions."""

    def questions(layers):
        count = 0

        class Counting(header):
            def spec(self, name):
                nonlocal count
                count += 1
                return super().spec(name)

            def names(self):
                nonlocal count
                count += len(self._specs)
                return super().names()

        def specs(parts):
            return {f"model.layers.{i}.{k}.weight": spec(1) for i in range(layers) for k in range(parts)}

        text = "method: ties\nbase: base\nmodels: [a, b, c, d]\nparameters: {density: [0.1, 0.9]}"
        with pytest.raises(CheckpointError) if lacking else contextlib.nullcontext():
            recipes.plan(
                recipes.load(text),
                lambda reference: Counting(reference, specs(5 if reference == "base" else 5 - lacking)),
            )
        return count

    small, large = questions(100), questions(200)
    assert large <= 2.05 * small


def test_yaml_anchors_may_be_refined_but_keys_not_repeated(hub):
    text = """
method: linear
models:
  - &first {path: a, weight: 0.25}
  - {<<: *first, path: b}
"""
    assert recipes.plan(recipes.load(text), hub()).outputs[0].parameters == {"weight": [0.25, 0.25]}


def test_notes_of_nested_recipes_are_passed_on(hub):
    text = "method: linear\nmodels: [c, {recipe: {method: linear, base: base, models: [a]}, label: stage}]"
    notes = recipes.plan(recipes.load(text), hub()).notes
    assert "stage: base is only the template, because 'linear' has no base" in notes


def test_patterns_that_match_nothing_are_noted(hub):
    text = """
method: ties
base: base
models:
  - {path: a, weight: {"*.mpl.*": 0.5, "*": 1}}
  - b
parameters: {density: {"*.mlp.*": 0.2, "*.atn.*": 0.3, "*": 0.5}}
overrides:
  - {match: "*norm*", method: linear}
  - {match: ["*input_layernorm*", "*.layernrm.*"], method: linear}
output: {exclude: ["lm_head*", "*.nowhere"]}
"""
    notes = recipes.plan(recipes.load(text), hub()).notes
    assert [note for note in notes if "matches no tensor" in note] == [
        "exclude: '*.nowhere' matches no tensor",
        "overrides[1]: '*input_layernorm*', '*.layernrm.*' matches no tensor that an earlier override does not",
        "parameters: density for '*.atn.*' matches no tensor",
        "models[0]: weight for '*.mpl.*' matches no tensor",
    ]


@pytest.mark.parametrize(
    ("settings", "noted"),
    [
        ("parameters: {weight: [0.6, 0.4]}", ["parameters: weight"]),
        ("parameters: {density: [0.6, 0.4], lambda: [0, 1]}", ["parameters: density"]),
        ("overrides: [{match: '*', weight: [2, 1]}]", ["overrides[0]: weight"]),
        ("parameters: {weight: [0.2, 0.8, 0.2]}", []),
        ("parameters: {weight: {'*mlp*': 1, '*': 2}}", []),
    ],
)
def test_lists_that_look_like_one_value_for_each_model_are_noted(hub, settings, noted):
    text = f"method: ties\nbase: base\nmodels: [{{path: a, density: [0.2, 0.3]}}, b]\n{settings}"
    notes = recipes.plan(recipes.load(text), hub()).notes
    found = [note.partition(" is a gradient over depth, the same for all models")[0] for note in notes]
    assert found == noted


def test_scientific_notation_is_a_number(hub):
    made = recipes.plan(recipes.load("method: linear\nmodels: [a, b]\nparameters: {weight: 1e-3}"), hub())
    assert made.outputs[0].parameters == {"weight": [1e-3, 1e-3]}


def test_a_mapping_may_hold_what_programs_hold(hub, tmp_path):
    document = {"method": "linear", "models": ({"path": tmp_path, "weight": np.float64(0.25)}, "b")}
    recipe = recipes.load(document)
    assert recipes.plan(recipe, hub()).outputs[0].parameters == {"weight": [0.25, 1.0]}
    assert recipes.load(recipe.text).parts == recipe.parts
