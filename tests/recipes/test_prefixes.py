"""Names behind a prefix: one line instead of one for each tensor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import merganser as mg
from merganser import recipes
from merganser.errors import CheckpointError, RecipeError
from merganser.recipes.prefixes import find_prefix

NAMES = {"model.embed.weight", "model.layers.0.w", "model.layers.1.w", "lm_head.weight"}


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_a_prefix_is_found_either_way(prefix):
    given, expected = find_prefix(NAMES, {prefix + name for name in NAMES})
    assert given == prefix + expected
    given, expected = find_prefix({prefix + name for name in NAMES}, NAMES)
    assert expected == prefix + given


def test_a_body_without_its_head_is_recognised():
    body = {name.removeprefix("model.") for name in NAMES if name.startswith("model.")}
    assert find_prefix(NAMES, body) == ("embed.weight", "model.embed.weight")
    assert find_prefix(NAMES, body | {"lm_head.weight"}) == ("embed.weight", "model.embed.weight")


def test_other_differences_are_none_of_a_prefix():
    assert find_prefix(NAMES, NAMES) is None
    assert find_prefix(NAMES, NAMES - {"lm_head.weight"}) is None
    assert find_prefix(NAMES, {"a.model.layers.0.w", "b.model.layers.1.w"}) is None


def test_a_plan_says_it_in_one_line(header, make_llama):
    def opener(reference):
        prefix = {"a": "", "b": "_orig_mod.", "c": "text."}[reference]
        return header(reference, {prefix + name: spec for name, spec in make_llama().items()})

    def message(models):
        with pytest.raises(CheckpointError) as error:
            recipes.plan(recipes.load({"method": "linear", "models": models}), opener)
        return str(error.value)

    first = message(["a", "b"])
    assert first.count("\n") == 0
    assert "b calls '_orig_mod.model.layers." in first
    assert "write `map: {'_orig_mod.': ''}` beside b" in first
    assert "remove the prefix '_orig_mod.' from the names of b" in message(["b", "a"])
    assert "write `map: {'': 'text.'}` beside a" in message(["c", "a"])


@pytest.mark.parametrize(("prefixes", "advice"), [(("", "text."), {"text.": ""}), (("text.", ""), {"": "text."})])
def test_the_map_in_the_message_is_what_it_needs(checkpoint, prefixes, advice):
    tensors = [{prefix + name: torch.full((2, 2), float(i)) for name in NAMES} for i, prefix in enumerate(prefixes)]
    a, b = (str(checkpoint(f"m{i}", each)) for i, each in enumerate(tensors))
    with pytest.raises(CheckpointError) as error:
        recipes.plan(recipes.load({"method": "linear", "models": [a, b]}))
    assert f"write `map: {advice}` beside {b}" in str(error.value)
    recipe = {"method": "linear", "models": [a, {"path": b, "map": advice}]}
    merged = mg.run(recipe, Path(a).with_name("out"))
    assert all(torch.equal(tensor, torch.full((2, 2), 0.5)) for tensor in mg.open(merged).values())
    assert set(mg.open(merged)) == set(tensors[0])


def test_a_map_may_stand_in_a_recipe_of_mergekit():
    entry = {"model": "./llm", "map": {"model.": "model.language_model."}, "parameters": {"weight": 0.5}}
    document = {"merge_method": "linear", "models": [{"model": "./vlm", "parameters": {"weight": 0.5}}, entry]}
    read = recipes.load(document).parts[0].slices[0].models
    assert [each.map for each in read] == [{}, {"model.": "model.language_model."}]
    document["models"][1]["map"] = {"model.": 3}
    with pytest.raises(RecipeError, match=r"models\[1\].map"):
        recipes.load(document)
