"""A nested merge presents the tokenizer, chat template and generation settings of its own plan."""

from __future__ import annotations

import json

import pytest
import torch

import merganser as mg
from merganser.checkpoints.base import TensorSpec
from merganser.checkpoints.chat_templates import TEMPLATES
from merganser.recipes.loading import load
from merganser.recipes.planning import prepare

EMBEDDING = "model.embed_tokens.weight"
STAGE = "method: linear\nmodels: [ta, tb]\noutput: {tokenizer: tb, chat_template: chatml}\n"


@pytest.fixture
def family(directory, tmp_path):
    """ta has four tokens; tb and tc six, tc in another order; stage.yml merges ta and tb under tb's tokens."""
    vocabularies = {"ta": "uvwx", "tb": "uxwvyz", "tc": "zyxwvu"}
    for seed, (name, tokens) in enumerate(vocabularies.items()):
        config = {"vocab_size": len(tokens), "eos_token_id": len(tokens) - 1}
        vocabulary = {"model": {"vocab": {token: i for i, token in enumerate(tokens)}}, "added_tokens": []}
        files = {
            "tokenizer.json": vocabulary,
            "tokenizer_config.json": {"chat_template": name},
            "generation_config.json": {"eos_token_id": len(tokens) - 1},
        }
        directory(name, {EMBEDDING: TensorSpec((len(tokens), 2), torch.float32)}, config, seed, files)
    (tmp_path / "stage.yml").write_text(STAGE)

    def merged(recipe):
        (tmp_path / "recipe.yml").write_text(recipe)
        out = mg.run(tmp_path / "recipe.yml", tmp_path / "out", overwrite=True)
        return mg.open(out).read(EMBEDDING), lambda file: json.loads((out / file).read_text())

    return merged


def vocabulary(read):
    data = read("tokenizer.json")
    added = {record["content"]: record["id"] for record in data["added_tokens"]}
    return data["model"]["vocab"] | added


@pytest.mark.parametrize("depth", [1, 2])
def test_an_outer_merge_keeps_what_the_inner_one_chose(family, tmp_path, depth):
    inner = "stage.yml"
    if depth == 2:
        (tmp_path / "again.yml").write_text("method: linear\nmodels: [stage.yml, tb]\n")
        inner = "again.yml"
    rows, read = family(f"method: linear\nmodels: [{inner}, tb]\n")
    assert rows.shape == (6, 2)
    assert "".join(vocabulary(read)) == "uxwvyz"
    assert read("config.json") == {"vocab_size": 6, "eos_token_id": 5}
    assert read("generation_config.json") == {"eos_token_id": 5}
    assert read("tokenizer_config.json")["chat_template"] == TEMPLATES["chatml"]


def test_rows_of_a_nested_merge_are_read_under_its_own_tokens(family, tmp_path):
    stage, _ = family(STAGE)
    rows, read = family("method: linear\nmodels: [stage.yml, tc]\noutput: {tokenizer: union}\n")
    numbers = vocabulary(read)
    tc = mg.open(tmp_path / "tc").read(EMBEDDING)
    for token, row in numbers.items():
        expected = (stage["uxwvyz".index(token)] + tc["zyxwvu".index(token)]) / 2
        torch.testing.assert_close(rows[row], expected)


def test_a_nested_merge_may_give_its_tokenizer_to_another(family, tmp_path):
    (tmp_path / "stage.yml").write_text("method: linear\nmodels: [ta, tb]\noutput: {tokenizer: union}\n")
    rows, read = family("method: linear\nmodels: [tc, stage.yml]\noutput: {tokenizer: stage.yml}\n")
    assert "".join(vocabulary(read)) == "uvwxyz"
    assert rows.shape == (6, 2)


def test_auto_counts_the_templates_of_nested_merges(family):
    _, read = family(
        "method: linear\nmodels: [tb, stage.yml, {recipe: stage.yml, label: again}]\noutput: {chat_template: auto}\n"
    )
    assert read("tokenizer_config.json")["chat_template"] == TEMPLATES["chatml"]


@pytest.mark.parametrize(
    ("models", "absent"), [("[bare, ta]", ["config.json", "tokenizer"]), ("[ta, bare]", []), ("[bare, bare2]", [])]
)
def test_files_that_the_first_model_lacks_are_noted(family, directory, tmp_path, models, absent):
    specs = {EMBEDDING: TensorSpec((4, 2), torch.float32)}
    directory("bare", specs), directory("bare2", specs)
    document = {"method": "linear", "models": [f"{tmp_path}/{name}" for name in models.strip("[]").split(", ")]}
    notes = [note for note in prepare(load(document)).plan.notes if "the output has no" in note]
    assert [note.partition(",")[0].removeprefix("the output has no ") for note in notes] == absent
    assert all("bare has none; copy that of" in note and note.endswith("ta") for note in notes)
