"""mergekit's dialect: the shapes of its examples and documentation, its semantics, and what is not a merge."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from merganser import recipes
from merganser.engine.plan import Source
from merganser.errors import RecipeError
from merganser.recipes.schema import OutputOptions, TokenizerOptions, TokenRow

LINEAR = """
models:
  - {model: psmathur/orca_mini_v3_13b, parameters: {weight: 1.0}}
  - {model: WizardLM/WizardLM-13B-V1.2, parameters: {weight: 0.3}}
  - {model: garage-bAInd/Platypus2-13B, parameters: {weight: 0.5}}
merge_method: linear
dtype: float16
"""
TIES = """
models:
  - model: psmathur/orca_mini_v3_13b
    parameters: {density: [1, 0.7, 0.1], weight: 1.0}
  - model: garage-bAInd/Platypus2-13B
    parameters: {density: 0.5, weight: [0, 0.3, 0.7, 1]}
  - model: WizardLM/WizardMath-13B-V1.0
    parameters:
      density: 0.33
      weight:
        - {filter: mlp, value: 0.5}
        - {value: 0}
merge_method: ties
base_model: TheBloke/Llama-2-13B-fp16
parameters: {normalize: true, int8_mask: true}
dtype: float16
"""
BIO = """
models:
  - model: mistralai/Mistral-7B-Instruct-v0.2
    parameters: {density: 0.5, weight: 0.5}
  - model: BioMistral/BioMistral-7B
    parameters: {density: 0.5, weight: 0.5}
merge_method: ties
base_model: mistralai/Mistral-7B-v0.1
parameters: {normalize: false, int8_mask: true}
dtype: float16
"""
SLERP = """
slices:
  - sources:
      - {model: psmathur/orca_mini_v3_13b, layer_range: [0, 40]}
      - {model: garage-bAInd/Platypus2-13B, layer_range: [0, 40]}
merge_method: slerp
base_model: psmathur/orca_mini_v3_13b
parameters:
  t:
    - {filter: self_attn, value: [0, 0.5, 0.3, 0.7, 1]}
    - {filter: mlp, value: [1, 0.5, 0.7, 0.3, 0]}
    - {value: 0.5}
dtype: float16
"""
FRANKEN = """
slices:
  - sources: [{model: psmathur/orca_mini_v3_13b, layer_range: [0, 24]}]
  - sources: [{model: garage-bAInd/Platypus2-13B, layer_range: [20, 40]}]
merge_method: passthrough
dtype: float16
"""
FUSION = """
models: [{model: model_a}, {model: model_b}]
merge_method: arcee_fusion
base_model: model_a
dtype: bfloat16
"""
MULTI = """
name: first-merge
merge_method: linear
models: [{model: mistralai/Mistral-7B-v0.1}, {model: BioMistral/BioMistral-7B}]
parameters: {weight: 0.5}
---
name: second-merge
merge_method: slerp
base_model: first-merge
models: [{model: NousResearch/Hermes-2-Pro-Mistral-7B}]
parameters: {t: 0.5}
---
merge_method: dare_ties
base_model: mistralai/Mistral-7B-v0.1
models:
  - {model: second-merge, parameters: {density: 0.6, weight: 0.5}}
  - {model: teknium/OpenHermes-2.5-Mistral-7B, parameters: {density: 0.8, weight: 0.5}}
"""
EXAMPLES = {
    "linear": LINEAR,
    "ties": TIES,
    "bio-merge": BIO,
    "gradient-slerp": SLERP,
    "44layer": FRANKEN,
    "fusion": FUSION,
    "multi": MULTI,
}
# One configuration for each method of the method guide, with every parameter it documents.
GUIDE = {
    "slerp": ("a", ["a", "b"], {"t": 0.3}, {}),
    "nuslerp": (None, ["a", "b"], {"nuslerp_flatten": False, "nuslerp_row_wise": True}, {"weight": 0.4}),
    "multislerp": ("base", ["a", "b", "c"], {"normalize_weights": True, "eps": 1e-8}, {"weight": 1.0}),
    "karcher": (None, ["a", "b", "c"], {"max_iter": 10, "tol": 1e-5}, {}),
    "task_arithmetic": ("base", ["a", "b"], {"lambda": 0.7}, {"weight": 0.5}),
    "ties": ("base", ["a", "b"], {"lambda": 1.0}, {"weight": 0.5, "density": 0.2}),
    "dare_linear": ("base", ["a", "b"], {"lambda": 1.0, "rescale": True}, {"weight": 0.5, "density": 0.5}),
    "dare_ties": ("base", ["a", "b"], {"lambda": 1.0}, {"weight": 0.5, "density": 0.5}),
    "della": ("base", ["a", "b"], {"lambda": 1.0}, {"weight": 0.5, "density": 0.5, "epsilon": 0.1}),
    "della_linear": ("base", ["a", "b"], {}, {"weight": 0.5, "density": 0.5, "epsilon": 0.1}),
    "breadcrumbs": ("base", ["a", "b"], {}, {"weight": 0.5, "density": 0.9, "gamma": 0.01}),
    "breadcrumbs_ties": ("base", ["a", "b"], {}, {"weight": 0.5, "density": 0.9, "gamma": 0.01}),
    "sce": ("base", ["a", "b"], {"select_topk": 0.5, "int8_mask": True}, {}),
    "ram": ("base", ["a", "b"], {"epsilon": 1e-5}, {}),
    "ramplus_tl": ("base", ["a", "b"], {"epsilon": 1e-5, "r": 0.1, "alpha": 0.2}, {}),
    "model_stock": ("base", ["a", "b"], {"filter_wise": False}, {}),
    "nearswap": ("base", ["a"], {"t": 0.001}, {}),
    "arcee_fusion": ("a", ["a", "b"], {}, {}),
    "passthrough": (None, ["a"], {}, {"scale": [{"filter": "down_proj", "value": 0.5}, {"value": 1.0}]}),
}


def outputs(plan):
    return {output.name: output for output in plan.outputs}


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_validate_and_plan(name, hub):
    plan = recipes.plan(recipes.load(EXAMPLES[name]), hub(layers=40))
    assert plan.outputs
    assert pickle.loads(pickle.dumps(plan)) == plan


@pytest.mark.parametrize("method", GUIDE)
def test_every_documented_method_plans_with_its_documented_parameters(method, hub):
    base, models, shared, own = GUIDE[method]
    document = {
        "merge_method": method,
        "models": [{"model": model, "parameters": own} for model in models],
        "parameters": shared,
    }
    plan = recipes.plan(recipes.load(document | ({"base_model": base} if base else {})), hub())
    assert len(plan.outputs) == 23
    unexpected = [note for note in plan.notes if "has no effect" in note and "int8_mask" not in note]
    assert not unexpected


@pytest.mark.parametrize(
    ("option", "meant"),
    [
        ({"tokenizer_source": "union"}, OutputOptions(widest=True, tokenizer=TokenizerOptions("union"))),
        ({"tokenizer_source": "base"}, OutputOptions(widest=True, tokenizer=TokenizerOptions("base"))),
        ({"tokenizer_source": "b"}, OutputOptions(widest=True, tokenizer=TokenizerOptions("b"))),
        ({"tokenizer_source": "model:b"}, OutputOptions(widest=True, tokenizer=TokenizerOptions("b"))),
        (
            {"tokenizer": {"source": "union", "pad_to_multiple_of": 64}},
            OutputOptions(widest=True, tokenizer=TokenizerOptions("union", pad_to_multiple_of=64)),
        ),
        ({"chat_template": "auto"}, OutputOptions(widest=True, chat_template="auto")),
        ({"chat_template": "chatml"}, OutputOptions(widest=True, chat_template="chatml")),
        ({"out_dtype": "bfloat16", "dtype": "float32"}, OutputOptions(dtype="bfloat16")),
    ],
)
def test_documented_options_mean_what_they_say(option, meant):
    recipe = recipes.load({"merge_method": "linear", "models": [{"model": "a"}, {"model": "b"}], **option})
    assert recipe.output == meant


def test_every_way_to_say_where_a_token_comes_from():
    tokens = {
        "<|im_start|>": {"source": "a"},
        "<|special|>": {"source": "a", "force": True},
        "<|renamed_token|>": {"source": {"kind": "model_token", "model": "a", "token": "<|original|>"}},
        "<|by_id|>": {"source": {"kind": "model_token", "model": "a", "token_id": 12}},
        "<|unused|>": {"source": {"kind": "zero"}},
    }
    tokenizer = {"source": "union", "tokens": tokens, "pad_to_multiple_of": None}
    recipe = recipes.load(
        {"merge_method": "linear", "models": [{"model": "a"}, {"model": "b"}], "tokenizer": tokenizer}
    )
    assert recipe.output.tokenizer == TokenizerOptions(
        "union",
        {
            "<|im_start|>": TokenRow("a"),
            "<|special|>": TokenRow("a", force=True),
            "<|renamed_token|>": TokenRow("a", "<|original|>"),
            "<|by_id|>": TokenRow("a", 12),
            "<|unused|>": TokenRow(zero=True),
        },
    )


def test_gradients_and_filters_as_in_the_ties_example(hub):
    made = outputs(recipes.plan(recipes.load(TIES), hub(layers=40)))
    first, last = made["model.layers.0.mlp.up_proj.weight"], made["model.layers.39.self_attn.q_proj.weight"]
    assert first.parameters["density"] == [1.0, 0.5, 0.33]
    assert first.parameters["weight"] == [1.0, 0.0, 0.5]
    assert last.parameters["density"] == pytest.approx([0.1, 0.5, 0.33])
    assert last.parameters["weight"] == [1.0, 1.0, 0.0]
    # Outside the layers depth is 0, also after them: so mergekit has it.
    assert made["lm_head.weight"].parameters["density"][0] == 1.0
    assert first.base is not None
    assert first.base.model == 0
    assert str(first.spec.dtype) == "torch.float16"


def test_gradient_slerp_starts_at_the_base(hub):
    made = outputs(recipes.plan(recipes.load(SLERP), hub(layers=40)))
    attention = [made[f"model.layers.{i}.self_attn.q_proj.weight"].parameters["t"] for i in range(40)]
    assert attention[0] == 0
    assert attention[39] == pytest.approx(1)
    assert made["model.layers.0.mlp.up_proj.weight"].parameters["t"] == 1
    assert made["model.norm.weight"].parameters["t"] == 0.5
    assert made["model.norm.weight"].base.model == 0
    assert [source.model for source in made["model.norm.weight"].inputs] == [1]


@given(data=st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_parameters_are_looked_up_source_first_then_slice_then_recipe(data, hub):
    """Against a naive walk over the levels; a level whose filters do not match passes on to the next."""
    value = st.one_of(
        st.none(),
        st.floats(0, 1),
        st.lists(st.floats(0, 1), min_size=2, max_size=3),
        st.lists(
            st.fixed_dictionaries(
                {"filter": st.sampled_from(["mlp", "self_attn", "layers.1", "*"]), "value": st.floats(0, 1)}
            ),
            min_size=1,
            max_size=2,
        ),
    )
    own, sliced, shared = data.draw(value), data.draw(value), data.draw(value)
    if isinstance(shared, list) and isinstance(shared[0], dict):
        shared.append({"filter": "*", "value": 0.25})
    elif shared is None and (own is not None or sliced is not None):
        shared = 0.75  # a weight that is given must be given for every tensor
    start = data.draw(st.integers(0, 2))
    document = {
        "merge_method": "linear",
        "slices": [
            {
                "sources": [
                    {"model": "a", "layer_range": [start, start + 2]}
                    | ({"parameters": {"weight": own}} if own is not None else {}),
                    {"model": "b", "layer_range": [0, 2], "parameters": {"weight": 0.5}},
                ]
            }
            | ({"parameters": {"weight": sliced}} if sliced is not None else {})
        ],
    } | ({"parameters": {"weight": shared}} if shared is not None else {})

    made = outputs(recipes.plan(recipes.load(document), hub()))
    for k in range(2):
        for part in ("mlp.up_proj", "self_attn.q_proj"):
            source = f"model.layers.{start + k}.{part}.weight"
            expected = 1.0
            for level in (own, sliced, shared):
                found = naive(level, source, k / 1)
                if found is not None:
                    expected = found
                    break
            weight = made[f"model.layers.{k}.{part}.weight"].parameters["weight"]
            assert weight == pytest.approx([expected, 0.5])


def naive(level, name, t):
    if level is None or isinstance(level, float):
        return level
    if isinstance(level[0], dict):
        return next((c["value"] for c in level if c["filter"] == "*" or c["filter"] in name), None)
    if len(level) == 2:
        return level[0] * (1 - t) + level[1] * t
    return level[0] * (1 - 2 * t) + level[1] * 2 * t if t <= 0.5 else level[1] * (2 - 2 * t) + level[2] * (2 * t - 1)


def test_defaults_are_mergekits_where_they_differ(hub):
    document = {"merge_method": "ties", "base_model": "base", "models": [{"model": "a", "parameters": {"weight": 1}}]}
    made = recipes.plan(recipes.load(document), hub()).outputs[0]
    assert made.parameters["density"] == [1.0]
    filtered = document | {"parameters": {"density": [{"filter": "nowhere", "value": 0.1}]}}
    assert recipes.plan(recipes.load(filtered), hub()).outputs[0].parameters["density"] == [1.0]


def test_the_base_among_the_models_is_no_task_vector(hub):
    document = {
        "merge_method": "ties",
        "base_model": "base",
        "models": [{"model": "base"}, {"model": "a", "parameters": {"weight": 0.5}}],
    }
    made = recipes.plan(recipes.load(document), hub()).outputs[0]
    assert [source.model for source in made.inputs] == [1]
    assert made.parameters["weight"] == [0.5]


def test_a_base_of_a_method_without_base_counts_as_a_model_where_it_can(hub):
    document = {
        "merge_method": "linear",
        "base_model": "base",
        "models": [{"model": "a"}],
        "parameters": {"weight": 0.5},
    }
    plan = recipes.plan(recipes.load(document), hub())
    assert [source.model for source in plan.outputs[0].inputs] == [0, 1]
    assert any("counts as one of the models" in note for note in plan.notes)
    document["models"] = [{"model": "a", "parameters": {"weight": 0.5}}]
    del document["parameters"]
    plan = recipes.plan(recipes.load(document), hub())
    assert [source.model for source in plan.outputs[0].inputs] == [1]
    assert any("only the template" in note for note in plan.notes)


def test_keys_without_effect_are_explained():
    notes = recipes.load(TIES.replace("normalize: true", "rescale: false")).notes
    assert notes == ("parameters.int8_mask has no effect: masks take no memory here",)
    document = {
        "merge_method": "passthrough",
        "slices": [{"sources": [{"model": "a", "layer_range": [0, 1]}], "residual_weight": 0.5}],
        "parameters": {"density": 0.5},
    }
    notes = recipes.load(document).notes
    assert "slices[0].residual_weight has no effect (nor in mergekit)" in notes
    assert any("parameters.density has no effect" in note for note in notes)


def test_references_with_revision_and_adapter(hub):
    opened = []

    def opener(reference):
        opened.append(reference)
        return hub()(reference)

    document = {
        "merge_method": "linear",
        "models": [
            {"model": "owner/model@v2+owner/lora"},
            {"model": {"model": {"path": "owner/other", "revision": "abc"}, "lora": {"path": "owner/lora"}}},
        ],
    }
    recipes.plan(recipes.load(document), opener)
    assert opened == ["owner/model@v2+owner/lora", "owner/other@abc+owner/lora"]


def test_modules_of_a_multimodal_model(header, make_llama):
    def opener(reference):
        text = {f"language_model.{name}": spec for name, spec in make_llama(4).items()}
        vision = {f"vision_tower.{name}": spec for name, spec in make_llama(2, head=False).items()}
        return header(reference, text | vision)

    document = {
        "merge_method": "passthrough",
        "modules": {
            "text_decoder": {
                "slices": [
                    {"sources": [{"model": "a", "layer_range": [0, 3]}]},
                    {"sources": [{"model": "b", "layer_range": [1, 4]}]},
                ]
            },
            "vision_tower": {"models": [{"model": "a"}], "parameters": {"scale": 2.0}},
        },
    }
    made = outputs(recipes.plan(recipes.load(document), opener))
    assert (
        made["language_model.model.layers.5.mlp.up_proj.weight"]
        .inputs[0]
        .name.startswith("language_model.model.layers.3.")
    )
    assert made["vision_tower.model.layers.1.mlp.up_proj.weight"].parameters == {"scale": [2.0]}
    assert "language_model.model.layers.6.mlp.up_proj.weight" not in made


def test_stages_nest_in_order_of_need_and_nothing_is_written(hub):
    documents = MULTI.strip().split("---")
    shuffled = "\n---\n".join([documents[1], documents[0], documents[2]])
    for text in (MULTI, shuffled):
        plan = recipes.plan(recipes.load(text), hub())
        assert [model.label for model in plan.models] == [
            "mistralai/Mistral-7B-v0.1",
            "second-merge",
            "teknium/OpenHermes-2.5-Mistral-7B",
        ]
        second = plan.models[1].plan
        assert second is not None
        assert second.outputs[0].method == "slerp"
        assert second.models[0].plan is not None
        assert second.models[0].plan.outputs[0].method == "linear"


def test_stages_that_all_have_names_end_with_the_last(hub):
    text = MULTI.replace("---\nmerge_method: dare_ties", "---\nname: third\nmerge_method: dare_ties")
    assert recipes.load(text).method == "dare_ties"


def test_the_stage_without_a_name_is_the_result_wherever_it_stands(hub):
    named = "name: extra\nmerge_method: slerp\nbase_model: a\nmodels: [{model: a}, {model: b}]\nparameters: {t: 0.5}"
    text = f"merge_method: linear\nmodels: [{{model: a}}, {{model: b}}]\nparameters: {{weight: 1}}\n---\n{named}"
    recipe = recipes.load(text)
    assert recipe.method == "linear"
    assert "stage 'extra' is not used" in recipes.plan(recipe, hub()).notes


def test_filters_that_match_nothing_are_noted(hub):
    text = """
merge_method: linear
models:
  - {model: a, parameters: {weight: [{filter: mpl, value: 0.2}, {filter: mlp, value: 0.3}, {value: 1}]}}
  - {model: b, parameters: {weight: 1}}
"""
    notes = recipes.plan(recipes.load(text), hub()).notes
    assert [note for note in notes if "matches no tensor" in note] == [
        "models[0]: weight for '*mpl*' matches no tensor"
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "base_model: a\ngate_mode: hidden\nexperts: [{source_model: a}]",
            "mixture-of-experts configuration (mergekit-moe)",
        ),
        ("genome: {models: [a], merge_method: linear}\ntasks: []", "search configuration (mergekit-evolve)"),
        ("base_model: a\ngate_mode: random\narchitecture: qwen", "mixture-of-experts configuration (mergekit-moe)"),
        ("model: a\ndonor: b\nk: 64", "tokenizer transplant (mergekit-tokensurgeon)"),
        ("layer_slices: [{model: a, start: 0, end: 4}]", "a bakllama configuration"),
    ],
)
def test_files_of_other_tools_are_refused_by_name(text, message):
    with pytest.raises(RecipeError, match="not a merge") as error:
        recipes.load(text)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("method", "parameters", "note"),
    [
        (
            "task_arithmetic",
            {"weight": 1},
            "slices[0]: base is not among its models and contributes layers [1, 3) like a",
        ),
        ("linear", {"weight": 1}, "base is only the template, because 'linear' has no base"),
        ("passthrough", {}, None),
    ],
)
def test_what_a_base_outside_its_slices_does_is_noted(method, parameters, note, hub):
    names = ["a"] if method == "passthrough" else ["a", "b"]
    sources = [{"model": model, "layer_range": [1 + i, 3 + i]} for i, model in enumerate(names)]
    document = {
        "merge_method": method,
        "base_model": "base",
        "slices": [{"sources": sources, "parameters": parameters}],
    }
    plan = recipes.plan(recipes.load(document), hub())
    assert plan.notes == ((note,) if note else ())
    if method == "task_arithmetic":
        base = outputs(plan)["model.layers.0.mlp.up_proj.weight"].base
        assert base == Source(0, "model.layers.1.mlp.up_proj.weight")
        sources.append({"model": "base", "layer_range": [0, 2]})
        assert not recipes.plan(recipes.load(document), hub()).notes


def test_an_unlisted_base_takes_part_unless_only_the_models_have_weights(hub):
    def made(shared, own):
        models = [{"model": model, "parameters": own} for model in ("a", "b")]
        document = {"merge_method": "linear", "base_model": "base", "models": models, "parameters": shared}
        return recipes.plan(recipes.load(document), hub())

    alone = made({}, {"weight": 1})
    assert len(alone.outputs[0].inputs) == 2
    assert "base is only the template, because 'linear' has no base" in alone.notes
    joined = made({"weight": 1}, {})
    assert len(joined.outputs[0].inputs) == 3
    assert "base is the base and counts as one of the models, because 'linear' has no base" in joined.notes
