"""`merganser report` over what the other commands leave behind, called as a user would."""

import json
import re
import sys

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from typer.testing import CliRunner

from merganser.cli import build
from merganser.errors import InputError
from merganser.library import Library

runner = CliRunner()
SOURCE = """
import torch
from torch import nn

def network():
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3)), torch.zeros(2, 6)

def score(weights, budget):
    return -float(sum(tensor.abs().sum() for tensor in weights.values())) + budget

def constant(weights, budget):
    return 0.5
"""


def invoke(*arguments):
    result = runner.invoke(build(), [*map(str, arguments)])
    if result.exception is not None:
        raise result.exception
    return result.stdout


def found(path, *arguments):
    """What the report says it found, one thing, and its page."""
    told = json.loads(invoke("report", path, "--json", *arguments))
    with open(told["path"], encoding="utf-8") as file:
        return told["found"], file.read()


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A base and two experts with a config, and a user's module."""
    rng = torch.Generator().manual_seed(0)
    shapes = {"embed_tokens.weight": (20, 8), "layers.0.weight": (8, 8), "layers.1.weight": (8, 8)}
    base = {name: torch.randn(shape, generator=rng) for name, shape in shapes.items()}
    for name in ("base", "math", "code"):
        moved = {k: t + (name != "base") * 0.1 * torch.randn(t.shape, generator=rng) for k, t in base.items()}
        (tmp_path / name).mkdir()
        save_file(moved, tmp_path / name / "model.safetensors")
        config = {"model_type": "tiny", "vocab_size": 20, "num_hidden_layers": 2}
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    (tmp_path / "users_scores.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("users_scores", None)


def forget_configs(place):
    """Leave the weights alone: `evaluate` loads models with a config by transformers, which does not know these."""
    for name in ("base", "math", "code"):
        (place / name / "config.json").unlink()


def recipe(place, **more):
    content = {"method": "ties", "base": "base", "models": ["math", "code"], **more}
    (place / "recipe.yml").write_text(json.dumps(content))
    return place / "recipe.yml"


def test_a_merge_shows_its_recipe_its_checks_and_its_tensors(place):
    invoke("merge", recipe(place), "out")
    [merge], page = found("out", "--check")
    assert merge["kind"] == "merge"
    assert merge["methods"] == "ties"
    assert merge["checks"] == {
        "layers: 2 in config, 2 in layers": True,
        "vocabulary: the same in config and embed_tokens.weight": True,
        "tokenizer: its files are there": False,
        "every value is finite": True,
    }
    for part in ("base: base", "model: math", "model: code", "layers.1.weight", "model_type", "model.safetensors"):
        assert part in page
    assert (place / "out" / "report.html").exists()


def test_a_checkpoint_of_others_and_an_adapter_are_described_too(place):
    [plain], page = found("base")
    assert (plain["kind"], plain["methods"], plain["tensors"]) == ("checkpoint", None, 3)
    assert "every value is finite" not in page
    adapter = place / "adapter"
    adapter.mkdir()
    save_file({"layers.0.lora_A.weight": torch.ones(2, 8)}, adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text(json.dumps({"r": 2, "base_model_name_or_path": "nowhere/at-all"}))
    [described], page = found("adapter")
    assert (described["kind"], described["parameters"]) == ("adapter", 16)
    assert "nowhere/at-all" in page


def test_a_library_is_shown_and_checked_even_without_its_base(place):
    Library.build("base", {"math": "math", "code": "code"}, "lib")
    [library], page = found("lib", "--check")
    assert (library["kind"], library["experts"], library["sound"]) == ("library", ["math", "code"], True)
    assert "Files compared with the manifest" in page
    (place / "base").rename(place / "moved")
    [library], page = found("lib")
    assert library["ratio"] is None
    assert "the base could not be opened" in page


def test_an_alignment_shows_before_and_after(place):
    torch.manual_seed(0)
    for name in ("a", "b"):
        network = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
        save_file(network.state_dict(), place / f"{name}.safetensors")
    invoke("align", "a.safetensors", "b.safetensors", "aligned", "--model", "users_scores:network")
    [alignment], page = found("aligned")
    pair = alignment["pairs"][0]
    assert alignment["models"] == ["a", "b"]
    assert pair["cosine"]["after"] >= pair["cosine"]["before"]
    assert "cosine before" in page
    (place / "aligned" / "alignment.json").unlink()
    [alignment], page = found("aligned")
    assert alignment["models"] == ["network 1", "network 2"]
    assert "Cosine and distance of all weights, aligned" in page


def test_a_sweep_shows_variants_and_rungs(place):
    over = ("--over", "density=0.2,0.5,0.9", "--over", "scale=0.5,1")
    invoke("sweep", recipe(place), *over, "--score", "users_scores:score", "--rung", "1", "--rung", "2")
    [sweep], page = found("recipe.sweep.jsonl")
    assert (sweep["kind"], sweep["variants"]) == ("sweep", 6)
    assert sweep["best"].startswith("density=")
    assert "From rung to rung" in page
    assert (place / "recipe.sweep.html").exists()


def test_a_directory_of_several_things_is_one_page(place):
    runs = place / "runs"
    runs.mkdir()
    invoke("merge", recipe(place), "runs/one")
    Library.build("base", {"math": "math"}, "runs/library")
    things, page = found("runs", "--html", "all.html")
    assert [thing["kind"] for thing in things] == ["library", "merge"]
    assert "What is in runs" in page
    assert '<a href="#expert-library-library">library</a>' in page
    assert '<a href="#checkpoint-one">one</a>' in page
    assert "merged by ties; 3 tensors, 288 parameters; FAILED: tokenizer: its files are there" in page
    headings = re.findall(r"<h2 id=\"([^\"]*)\">([^<]*)</h2>", page)
    assert headings == [("expert-library-library", "Expert library: library"), ("checkpoint-one", "Checkpoint: one")]


def test_parts_of_one_page_have_headings_of_their_own(place):
    invoke("merge", recipe(place), "merged")
    things, page = found(place)
    assert len(things) == 4
    ids = re.findall(r"<h\d id=\"([^\"]*)\"", page)
    assert len(set(ids)) == len(ids) == len(re.findall(r"<h[2-6]", page))
    assert re.findall(r"<h2[^>]*>([^<]*)", page) == [
        f"Checkpoint: {name}" for name in ("base", "code", "math", "merged")
    ]
    assert page.count(">Every tensor</h3>") == 4


def test_what_is_not_known_is_said_with_what_was_looked_for(place):
    (place / "empty").mkdir()
    with pytest.raises(InputError, match=r"looked for library\.json, permutations\.safetensors.*sweep"):
        invoke("report", "empty")
    with pytest.raises(InputError, match="no such directory"):
        invoke("report", "nowhere")
    (place / "begun.partial").mkdir()
    with pytest.raises(InputError, match="unfinished merge: resume it"):
        invoke("report", "begun")
    with pytest.raises(InputError, match="no directory"):
        invoke("report", "base", "--html", "nowhere/page.html")


def test_an_evaluation_is_shown_alone_and_below_its_merge(place):
    forget_configs(place)
    invoke("merge", recipe(place), "out")
    told = invoke("evaluate", "out", "--json")
    (place / "told.json").write_text(told)
    [evaluation], page = found("told.json")
    assert evaluation["kind"] == "evaluation"
    assert evaluation["verdict"] == json.loads(told)["verdict"]
    assert f"out is {evaluation['verdict']}." in page
    assert ">Checks<" in page
    (place / "out" / "evaluation.json").write_text(told)
    both, page = found("out")
    assert [each["kind"] for each in both] == ["merge", "evaluation"]
    assert f"out is {evaluation['verdict']}" in page
    (place / "told.json").write_text(told.replace('"scores": {', '"scores": {"tasks": 3, ', 1))
    with pytest.raises(InputError, match=r"told\.json: not the JSON of `merganser evaluate`, or damaged"):
        invoke("report", "told.json")


@pytest.mark.parametrize("columns", [60, 100])
def test_sentences_fit_the_terminal(place, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    forget_configs(place)
    said = [
        invoke("inspect", "math", "code"),
        invoke("inspect", "math", "code", "--base", "base"),
        invoke("sweep", recipe(place), "--over", "scale=0.5,1", "--score", "users_scores:constant"),
        invoke("evaluate", "math", "--parent", "base"),
    ]
    assert [line for text in said for line in text.splitlines() if len(line) > columns] == []
