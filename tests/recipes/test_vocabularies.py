"""One vocabulary for models that differ in theirs."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from merganser import checkpoints, recipes
from merganser.checkpoints.base import TensorSpec
from merganser.checkpoints.row_runs import Terms
from merganser.checkpoints.sidecars import TokenizerFiles, apply_edits
from merganser.checkpoints.vocabulary import Remapped
from merganser.errors import CheckpointError, RecipeError


def tokenizer_json(tokens, added=()):
    records = [
        {"id": len(tokens) + i, "content": token, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": True}
        for i, token in enumerate(added)
    ]  # fmt: skip
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": records,
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": {t: i for i, t in enumerate(tokens)}, "unk_token": tokens[0]},
    }


def specs(rows, hidden=3):
    shapes = {
        "model.embed_tokens.weight": (rows, hidden),
        "lm_head.weight": (rows, hidden),
        "model.norm.weight": (hidden,),
    }
    shapes |= {f"model.layers.{i}.w": (hidden, hidden) for i in range(2)}
    return {name: TensorSpec(shape, torch.float32) for name, shape in shapes.items()}


@pytest.fixture
def family(directory):
    """Base: 5 tokens and a padding row; a: two tokens more; b: one of them, in another order."""

    def build():
        directory(
            "base", specs(6), {"vocab_size": 6}, 0, {"tokenizer.json": tokenizer_json(["u", "x", "y", "z"], ["<s>"])}
        )
        directory(
            "a",
            specs(7),
            {"vocab_size": 7},
            1,
            {"tokenizer.json": tokenizer_json(["u", "x", "y", "z"], ["<s>", "<a>", "<c>"])},
        )
        directory(
            "b",
            specs(6),
            {"vocab_size": 6},
            2,
            {"tokenizer.json": tokenizer_json(["u", "z", "y", "x"], ["<s>", "<c>"])},
        )

    return build


def views(plan):
    plain = [checkpoints.open(model.path) for model in plan.models]
    return plain, [
        Remapped(source, model.vocabulary, plain) if model.vocabulary else source
        for source, model in zip(plain, plan.models, strict=True)
    ]


def plan_for(tmp_path, tokenizer, method="linear", extra=""):
    (tmp_path / "recipe.yml").write_text(
        f"method: {method}\nbase: base\nmodels: [a, b]\noutput: {{tokenizer: {tokenizer}}}\n{extra}"
    )
    return recipes.plan(recipes.load(tmp_path / "recipe.yml"))


NAME = "model.embed_tokens.weight"


def test_without_the_option_unequal_rows_are_an_error_that_suggests_it(family, tmp_path):
    family()
    (tmp_path / "recipe.yml").write_text("method: linear\nbase: base\nmodels: [a, b]\n")
    with pytest.raises(CheckpointError, match="set output.tokenizer to base, union or one of the models"):
        recipes.plan(recipes.load(tmp_path / "recipe.yml"))


def test_equally_many_rows_of_other_tokens_are_noted(directory, tmp_path):
    words = {"base": "uxyz", "a": "uxyz", "b": "uzyx", "c": "uxyw"}
    for name, tokens in words.items():
        padding = {"padding": {"length": 3}} if name == "a" else {}
        directory(name, specs(6), {}, 0, {"tokenizer.json": tokenizer_json(list(tokens)) | padding})
    directory("odd", specs(6), {}, 0, {"tokenizer.json": "{}"})

    def notes(dialect):
        (tmp_path / "recipe.yml").write_text(dialect)
        return recipes.plan(recipes.load(tmp_path / "recipe.yml")).notes

    assert notes("method: task_arithmetic\nbase: base\nmodels: [a, b, c, odd]") == (
        "b numbers tokens differently from base (2 of them), and rows are merged by number; set output.tokenizer to "
        "merge them by token",
        "c numbers tokens differently from base (1 of them), and rows are merged by number; set output.tokenizer to "
        "merge them by token",
        "c has tokens that the output, with the tokenizer of base, will not know: w; set output.tokenizer to union to "
        "keep them",
    )
    # Tokens in rows that were padding, such as those of a chat template, are lost without a conflict.
    directory("d", specs(6), {}, 0, {"tokenizer.json": tokenizer_json([*"uxyz", "<|im_end|>"])})
    (lost,) = notes("method: task_arithmetic\nbase: base\nmodels: [d]")
    assert "will not know: <|im_end|>; set output.tokenizer to union" in lost
    assert not notes("method: task_arithmetic\nbase: d\nmodels: [base]")
    assert not notes("method: task_arithmetic\nbase: base\nmodels: [b]\noutput: {tokenizer: base}")
    mergekit = (
        "merge_method: linear\nmodels: [{model: a, parameters: {weight: 1}}, {model: b, parameters: {weight: 1}}]"
    )
    assert "set tokenizer_source to merge them by token" in notes(mergekit)[0]


def test_only_vocabulary_tensors_are_remapped_where_widths_are_equal(directory, tmp_path):
    """As many tokens as the network is wide: norms, dense layers and their biases have as many rows, too."""
    extra = {
        "model.norm.bias": (6,),
        "lm_head.bias": (6,),
        "lm_head.dense.weight": (6, 6),
        "lm_head.dense.bias": (6,),
        "predictions.bias": (6,),
    }
    shapes = specs(6, 6) | {name: TensorSpec(shape, torch.float32) for name, shape in extra.items()}
    words = {"base": "uvwxyz", "a": "uvwxyz", "b": "zyxwvu"}
    for name, tokens in words.items():
        directory(name, shapes, {}, 0, {"tokenizer.json": tokenizer_json(list(tokens))})
    plan = plan_for(tmp_path, "base")
    assert sorted(plan.models[2].vocabulary.tensors) == [
        "lm_head.bias",
        "lm_head.weight",
        "model.embed_tokens.weight",
        "predictions.bias",
    ]


def test_base_keeps_its_rows_padding_included(family, tmp_path):
    family()
    plan = plan_for(tmp_path, "base")
    (base, a, b), (base_view, a_view, b_view) = views(plan)
    assert plan.models[0].vocabulary is None
    assert base_view is base
    assert {o.name: o.spec.shape for o in plan.outputs}[NAME] == (6, 3)
    # u x y z <s>: a has them in place; row 5 is <a> there, so the padding is the base's.
    assert torch.equal(a_view.read(NAME), torch.cat([a.read(NAME)[:5], base.read(NAME)[5:6]]))
    expected = torch.cat([b.read(NAME)[[0, 3, 2, 1, 4]], base.read(NAME)[5:6]])
    assert torch.equal(b_view.read(NAME), expected)
    assert torch.equal(b_view.read("lm_head.weight")[1], b.read("lm_head.weight")[3])
    assert torch.equal(b_view.read("model.norm.weight"), b.read("model.norm.weight"))
    assert plan.sidecars.tokenizer == TokenizerFiles(model=0, added=())


def test_union_appends_and_fills_absent_rows_by_the_rule(family, tmp_path):
    family()
    plan = plan_for(tmp_path, "union")
    (base, a, b), (base_view, a_view, b_view) = views(plan)
    assert [record["content"] for record in plan.sidecars.tokenizer.added] == ["<a>", "<c>"]
    assert [record["id"] for record in plan.sidecars.tokenizer.added] == [5, 6]
    assert {o.name: o.spec.shape for o in plan.outputs}["lm_head.weight"] == (7, 3)
    assert (("vocab_size",), 7) in plan.sidecars.config
    # <a> is a's alone; <c> is a's and b's but not the base's, which gets their mean.
    assert torch.equal(base_view.read(NAME)[5], a.read(NAME)[5])
    torch.testing.assert_close(base_view.read(NAME)[6], (a.read(NAME)[6] + b.read(NAME)[5]) / 2)
    assert torch.equal(a_view.read(NAME), a.read(NAME))
    assert torch.equal(b_view.read(NAME)[5], a.read(NAME)[5])
    assert torch.equal(b_view.read(NAME)[6], b.read(NAME)[5])
    assert base_view.spec(NAME).shape == (7, 3)
    assert torch.equal(base_view.read(NAME)[:5], base.read(NAME)[:5])


def test_notes_count_the_tokens_of_the_whole_union(family, tmp_path):
    family()
    notes = plan_for(tmp_path, "{source: union, absent: mean}").notes
    assert {note for note in notes if "rows are computed" in note} >= {
        "base has 5 of 7 tokens; the other rows are computed by mean",
        "b has 6 of 7 tokens; the other rows are computed by mean",
    }


def test_a_named_model_and_padding_to_a_multiple(family, tmp_path):
    family()
    plan = plan_for(tmp_path, "{source: a, pad_to_multiple_of: 8}")
    (_, a, _), (base_view, a_view, b_view) = views(plan)
    assert plan.sidecars.tokenizer.model == 1
    for view in (base_view, a_view, b_view):
        assert view.read(NAME).shape == (8, 3)
    torch.testing.assert_close(a_view.read(NAME)[7], a.read(NAME).mean(0))


def test_tokens_with_sources_of_their_own(family, tmp_path):
    family()
    tokens = """{source: union, tokens: {
      "<s>": {source: b, force: true},
      "<new>": {source: {kind: model_token, model: a, token: "<a>"}},
      "<id>": {source: {kind: model_token, model: a, token_id: 2}},
      "<zero>": {source: {kind: zero}}}}"""
    plan = plan_for(tmp_path, tokens)
    (_, a, b), seen = views(plan)
    rows = {record["content"]: record["id"] for record in plan.sidecars.tokenizer.added}
    for view in seen:
        table = view.read(NAME)
        assert torch.equal(table[4], b.read(NAME)[4])
        assert torch.equal(table[rows["<new>"]], a.read(NAME)[5])
        assert torch.equal(table[rows["<id>"]], a.read(NAME)[2])
        assert not table[rows["<zero>"]].any()


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        ("c", "'c' is not a model of this merge; .*expected base, union or a model of the merge"),
        ('{source: base, tokens: {"<q>": {source: a}}}', "a has no row for the token '<q>'"),
        (
            '{source: base, tokens: {"<q>": {source: {kind: model_token, model: a, token_id: 99}}}}',
            "no row for the token 99",
        ),
    ],
)
def test_impossible_vocabularies(family, tmp_path, tokenizer, message):
    family()
    with pytest.raises(RecipeError, match=message):
        plan_for(tmp_path, tokenizer)


@pytest.mark.parametrize(
    ("asked", "place"),
    [
        ("tokenizer_source: c", "tokenizer_source"),
        ("tokenizer: {source: c}", "tokenizer"),
        ("chat_template: no-such-template", "chat_template"),
    ],
)
def test_messages_name_the_key_that_a_recipe_of_mergekit_has(family, tmp_path, asked, place):
    family()
    unite = "" if asked.startswith("tokenizer") else "tokenizer_source: union\n"
    text = "merge_method: task_arithmetic\nbase_model: base\nmodels: [{model: a, parameters: {weight: 1}}]\n"
    (tmp_path / "recipe.yml").write_text(f"{text}{unite}{asked}\n")
    with pytest.raises(RecipeError, match=f"^{place}: "):
        recipes.plan(recipes.load(tmp_path / "recipe.yml"))


def test_a_model_without_tokenizer_is_taken_to_have_the_bases(family, tmp_path):
    family()
    (tmp_path / "b" / "tokenizer.json").unlink()
    plan = plan_for(tmp_path, "base")
    assert plan.models[2].vocabulary is None
    assert any("b has no tokenizer" in note for note in plan.notes)
    (tmp_path / "a" / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match="its 7 embedding rows are not the 6 of base"):
        plan_for(tmp_path, "base")
    (tmp_path / "base" / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"base has no tokenizer.json, vocab.json or vocab.txt"):
        plan_for(tmp_path, "base")


def test_a_nested_union_keeps_its_tokens(family, tmp_path):
    family()
    (tmp_path / "stage.yml").write_text("method: linear\nbase: base\nmodels: [a, b]\noutput: {tokenizer: union}\n")
    (tmp_path / "recipe.yml").write_text("method: linear\nmodels: [stage.yml, a]\noutput: {tokenizer: union}\n")
    plan = recipes.plan(recipes.load(tmp_path / "recipe.yml"))
    assert [record["content"] for record in plan.sidecars.tokenizer.added] == ["<a>", "<c>"]
    assert {o.name: o.spec.shape for o in plan.outputs}[NAME] == (7, 3)
    assert plan.models[1].vocabulary is None


def test_a_nested_union_keeps_the_spelling_of_its_tokens(family, tmp_path):
    family()
    for file in tmp_path.glob("*/tokenizer.json"):
        file.write_text(file.read_text().replace("Whitespace", "ByteLevel").replace('"x"', '"\u0120x"'))
    (tmp_path / "stage.yml").write_text("method: linear\nbase: base\nmodels: [a, b]\noutput: {tokenizer: union}\n")
    (tmp_path / "recipe.yml").write_text("method: linear\nmodels: [stage.yml, b]\noutput: {tokenizer: union}\n")
    row = Terms.of(recipes.plan(recipes.load(tmp_path / "recipe.yml")).models[1].vocabulary.runs).within(1, 2)
    assert (row.models.tolist(), row.taken.tolist()) == ([1], [3]), "b has this token in row 3"


def test_base_without_any_tokenizer_or_embedding_asks_for_nothing(directory, tmp_path):
    for name in ("base", "a", "b"):
        directory(name, {"w": TensorSpec((2, 2), torch.float32)})
    assert plan_for(tmp_path, "base").models[0].vocabulary is None
    with pytest.raises(CheckpointError, match="base has no token embedding"):
        plan_for(tmp_path, "union")


def test_tied_heads_stay_tied(directory, tmp_path):
    for seed, (name, added) in enumerate((("base", []), ("a", ["<a>"]), ("b", ["<b>"]))):
        own = {n: s for n, s in specs(4 + len(added)).items() if n != "lm_head.weight"}
        directory(
            name, own, {"tie_word_embeddings": True}, seed, {"tokenizer.json": tokenizer_json(list("uxyz"), added)}
        )
    plan = plan_for(tmp_path, "union")
    assert "lm_head.weight" not in {output.name for output in plan.outputs}
    assert {o.name: o.spec.shape for o in plan.outputs}[NAME] == (6, 3)


@given(
    st.lists(st.permutations("uvwxyz").map(lambda p: p[:4]), min_size=2, max_size=3),
    st.sampled_from(["base", "union", "m1"]),
    st.sampled_from([None, 4]),
    st.booleans(),
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_rows_against_a_naive_lookup(tmp_path_factory, vocabularies, source, multiple, based):
    """Token by token: own row, else the base's if there is one, else the mean of those that have it, else zero."""
    import json

    from safetensors.torch import save_file

    root = tmp_path_factory.mktemp("family")
    tables = []
    for i, tokens in enumerate(vocabularies):
        (root / f"m{i}").mkdir()
        tables.append(torch.randn(4, 2, generator=torch.Generator().manual_seed(i)))
        save_file({NAME: tables[-1]}, root / f"m{i}" / "model.safetensors")
        (root / f"m{i}" / "tokenizer.json").write_text(json.dumps(tokenizer_json(list(tokens))))
    padding = f", pad_to_multiple_of: {multiple}" if multiple else ""
    names = ", ".join(f"m{i}" for i in range(based, len(vocabularies)))
    base = "base: m0\n" if based else ""
    (root / "r.yml").write_text(
        f"method: linear\n{base}models: [{names}]\noutput: {{tokenizer: {{source: {source}{padding}}}}}\n"
    )
    plan = recipes.plan(recipes.load(root / "r.yml"))
    _, seen = views(plan)
    expected = list(vocabularies[1] if source == "m1" else vocabularies[0])
    if source == "union":
        for tokens in vocabularies[1:]:
            expected += [token for token in tokens if token not in expected]
    height = len(expected) if not multiple else -(-len(expected) // multiple) * multiple
    for i, view in enumerate(seen):
        table = view.read(NAME).numpy()
        assert table.shape == (height, 2)
        for row, token in enumerate(expected):
            holders = [tables[j][list(v).index(token)].numpy() for j, v in enumerate(vocabularies) if token in v]
            if token in vocabularies[i]:
                wanted = tables[i][list(vocabularies[i]).index(token)].numpy()
            elif based and token in vocabularies[0]:
                wanted = holders[0]
            else:
                wanted = np.mean(holders, axis=0)
            np.testing.assert_allclose(table[row], wanted, rtol=1e-6)
        for row in range(len(expected), height):
            np.testing.assert_allclose(table[row], tables[i].mean(0), rtol=1e-5, atol=1e-6)
        assert torch.equal(view.read(NAME, (1, height)), view.read(NAME)[1:])


def test_an_adapter_that_adds_tokens_changes_the_size_in_the_config(tmp_path, directory):
    config = {"vocab_size": 6, "text_config": {"vocab_size": 6}, "audio_config": {"vocab_size": 99}}
    base = directory("base", specs(6), config)
    (tmp_path / "lora").mkdir()
    (tmp_path / "lora" / "adapter_config.json").write_text("{}")
    names = ("base_model.model.model.embed_tokens.weight", "base_model.model.lm_head.weight")
    save_file({name: torch.zeros(8, 3) for name in names}, tmp_path / "lora" / "adapter_model.safetensors")
    plan = recipes.plan(recipes.load({"method": "passthrough", "models": [f"{base}+{tmp_path}/lora"]}))
    assert {o.spec.shape for o in plan.outputs if "embed" in o.name or "head" in o.name} == {(8, 3)}
    assert plan.sidecars.config == ((("vocab_size",), 8), (("text_config", "vocab_size"), 8))
    assert any("its adapter has 8 embedding rows, its base 6" in note for note in plan.notes)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            {"text_config": {"vocab_size": 6}, "audio_config": {"vocab_size": 99}},
            {"text_config": {"vocab_size": 8}, "audio_config": {"vocab_size": 99}},
        ),
        (
            {"vocab_size": 6, "decoder": {"model_type": "gemma", "vocab_size": 6, "vocab_size_per_layer_input": 6}},
            {"vocab_size": 8, "decoder": {"model_type": "gemma", "vocab_size": 8, "vocab_size_per_layer_input": 8}},
        ),
        # A config on the hub may say no size that is its class's default.
        ({"text_config": {}, "vision_config": {}}, {"text_config": {"vocab_size": 8}, "vision_config": {}}),
        ({"model_type": "llama"}, {"model_type": "llama", "vocab_size": 8}),
    ],
)
@pytest.mark.parametrize("source", ["union", "base"])
def test_the_config_gets_the_size_of_the_vocabulary_that_changed(directory, tmp_path, config, expected, source):
    words = ["u", "x", "y", "z", "v", "w"]
    base = directory("base", specs(6), config, 0, {"tokenizer.json": tokenizer_json(words)})
    other = directory("other", specs(8), config, 1, {"tokenizer.json": tokenizer_json(words, ["<a>", "<b>"])})
    document = {"method": "linear", "models": [str(base), str(other)], "output": {"tokenizer": source}}
    plan = recipes.plan(recipes.load(document))
    assert apply_edits(config, plan.sidecars.config) == (expected if source == "union" else config)


def _renumber(path, token, number):
    file = path / "tokenizer.json"
    data = json.loads(file.read_text())
    data["model"]["vocab"][token] = number
    file.write_text(json.dumps(data))


@pytest.mark.parametrize("source", ["base", "union", "a"])
@pytest.mark.parametrize("model", ["base", "a"])
@pytest.mark.parametrize("number", [-1, 10**9, 14, 1.5, "1", True, None])
def test_ids_that_cannot_number_rows_are_refused(family, tmp_path, source, model, number):
    family()
    _renumber(tmp_path / model, "x", number)
    (tmp_path / "recipe.yml").write_text(
        f"method: linear\nbase: base\nmodels: [base, a]\noutput: {{tokenizer: {source}}}\n"
    )
    with pytest.raises(CheckpointError):
        recipes.plan(recipes.load(tmp_path / "recipe.yml"))


def test_a_token_just_beyond_the_rows_adds_one(family, tmp_path):
    family()
    _renumber(tmp_path / "base", "x", 7)
    (tmp_path / "recipe.yml").write_text("method: linear\nbase: base\nmodels: [base, a]\noutput: {tokenizer: base}\n")
    plan = recipes.plan(recipes.load(tmp_path / "recipe.yml"))
    assert plan.outputs[0].spec.shape[0] == 8


@pytest.mark.parametrize("multiple", [0, -64, 65537, 100_000_000])
def test_padding_has_bounds(multiple):
    text = f"method: linear\nmodels: [a, b]\noutput: {{tokenizer: {{pad_to_multiple_of: {multiple}}}}}\n"
    with pytest.raises(RecipeError, match="pad_to_multiple_of: expected 1 to 65536"):
        recipes.load(text)
