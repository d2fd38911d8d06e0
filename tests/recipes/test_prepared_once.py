"""A merge opens every model once and builds every rule once, from the recipe to the written checkpoint."""

from collections import Counter
from pathlib import Path

import pytest
import torch

import merganser as mg
from merganser import recipes
from merganser.checkpoints.opening import open as open_checkpoint
from merganser.engine import merge as merges
from merganser.engine.execute import execute
from merganser.engine.sinks import DictSink
from merganser.plain import to_yaml
from merganser.recipes import documents, outputs


@pytest.fixture
def recipe(checkpoint):
    """A merge over a nested merge that names the same base and a model of its own."""
    paths = {name: str(checkpoint(name, {"a": torch.randn(4, 3), "b": torch.randn(5)})) for name in ("base", "x", "y")}
    inner = {"method": "ties", "base": paths["base"], "models": [paths["x"]]}
    return {"method": "task_arithmetic", "base": paths["base"], "models": [inner, paths["y"]]}


def test_everything_is_opened_and_built_once(recipe, monkeypatch):
    opened, built = Counter(), Counter()
    build = merges.build

    def count(method, values, models):
        built[method.name] += 1
        return build(method, values, models)

    def open_once(reference):
        opened[reference] += 1
        return open_checkpoint(reference)

    monkeypatch.setattr(outputs, "build", count)
    monkeypatch.setattr(merges, "build", count)
    merge = recipes.prepare(recipes.load(recipe), open_once)
    sink = DictSink(merge.plan)
    execute(merge, sink)
    assert set(opened.values()) == {1}
    assert len(opened) == 3
    assert built == {"task_arithmetic": 1, "ties": 1}
    expected = mg.merge([mg.merge([recipe["models"][0]["models"][0]], "ties", recipe["base"]), recipe["models"][1]],
                        "task_arithmetic", recipe["base"])  # fmt: skip
    for name, tensor in sink.result().items():
        torch.testing.assert_close(tensor, expected[name])


def test_the_header_and_the_weights_are_read_through_one_opening(recipe, monkeypatch):
    """A file that is replaced meanwhile cannot have the header of one version and the weights of another."""
    opened, open_path = Counter(), Path.open
    monkeypatch.setattr(Path, "open", lambda path, *args, **options: opened.update([path.suffix]) or open_path(
        path, *args, **options))  # fmt: skip
    recipes.prepare(recipes.load(recipe))
    assert opened[".safetensors"] == 3


def test_a_recipe_is_parsed_once(recipe, tmp_path, monkeypatch):
    (tmp_path / "recipe.yml").write_text(to_yaml(recipe))
    parse, parsed = documents.parse, []
    monkeypatch.setattr(documents, "parse", lambda text, source: parsed.append(source) or parse(text, source))
    mg.run(tmp_path / "recipe.yml", tmp_path / "out")
    assert parsed == [str(tmp_path / "recipe.yml")]
