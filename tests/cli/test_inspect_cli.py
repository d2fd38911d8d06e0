"""`merganser inspect`, called as a user would."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from merganser.cli import build
from merganser.errors import CheckpointError, InputError
from merganser.interference import survey
from merganser.library import Library
from merganser.report.directories import report

runner = CliRunner()


def call(*arguments):
    result = runner.invoke(build(), ["inspect", *map(str, arguments)])
    if result.exception is not None:
        raise result.exception
    return result.stdout


@pytest.fixture
def models(tmp_path):
    """A base of two layers and three experts, the first two of which learned something in common in layer 1."""
    rng = torch.Generator().manual_seed(0)
    shapes = {"layers.0.weight": (20, 16), "layers.1.weight": (16, 20), "norm.weight": (8,)}
    base = {name: torch.randn(shape, generator=rng) for name, shape in shapes.items()}
    common = torch.randn(16, 1, generator=rng) @ torch.randn(1, 20, generator=rng)
    paths = {}
    for index, name in enumerate(("base", "math", "code", "law")):
        state = {
            key: tensor + (0.1 * torch.randn(tensor.shape, generator=rng) if index else 0)
            for key, tensor in base.items()
        }
        if name in ("math", "code"):
            state["layers.1.weight"] += common
        paths[name] = tmp_path / f"{name}.safetensors"
        save_file(state, paths[name])
    return paths


def test_one_checkpoint(models):
    shown = call(models["base"])
    assert "3 tensors, 648 parameters" in shown
    assert "layers.[0-1] " in shown, "equal layers are one row"
    assert "fingerprint" in shown
    assert "20×16" in call(models["base"], "--tensors")
    found = json.loads(call(models["base"], "--json"))["checkpoints"][0]
    assert found["nbytes"] == 648 * 4
    assert found["dtypes"] == {"float32": 648}
    assert [tensor["shape"] for tensor in found["tensors"]] == [[20, 16], [16, 20], [8]]
    assert found["tensors"][0]["not_finite"] is None


def test_values_that_are_not_finite_are_counted_on_request(tmp_path):
    bad = torch.zeros(5, 4, dtype=torch.bfloat16)
    bad[1, 2], bad[4, 0] = float("nan"), float("inf")
    save_file({"a": bad, "steps": torch.tensor(3)}, tmp_path / "bad.safetensors")
    assert "NOT FINITE: a (2)" in call(tmp_path / "bad.safetensors", "--check")
    found = json.loads(call(tmp_path / "bad.safetensors", "--check", "--json"))["checkpoints"][0]
    assert {tensor["name"]: tensor["not_finite"] for tensor in found["tensors"]} == {"a": 2, "steps": 0}


def test_tied_names_are_listed(tmp_path):
    weight = torch.randn(6, 4)
    torch.save({"embed.weight": weight, "head.weight": weight}, tmp_path / "tied.pt")
    assert "head.weight is tied to embed.weight" in call(tmp_path / "tied.pt")


def test_several_checkpoints_are_compared_where_they_can_be(models, tmp_path):
    first = json.loads(call(models["base"], models["law"], "--json"))["apart"][0]
    assert (first["model"], first["other"]) == ("base", "law")
    assert 0.9 < first["cosine"] < 1
    save_file({"other": torch.zeros(3)}, tmp_path / "odd.safetensors")
    assert "not compared: " in call(models["base"], tmp_path / "odd.safetensors")


def test_the_page_of_several_checkpoints_has_a_part_for_each_by_its_name(models, tmp_path):
    call(f"first={models['base']}", f"again={models['base']}", models["law"], "--html", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    for name in ("first", "again", "law"):
        assert f'<a href="#{name}">{name}</a>' in page
        assert f'<h2 id="{name}">{name}</h2>' in page
    call(models["base"], "--html", tmp_path / "page.html")
    assert "<section>" not in (tmp_path / "page.html").read_text()


def test_energy_kept_is_defined_where_it_is_shown(models, tmp_path):
    experts = {name: models[name] for name in ("math", "code")}
    library = Library.build(models["base"], experts, tmp_path / "lib")
    shown = call(*experts.values(), "--base", models["base"], "--html", tmp_path / "page.html")
    assert "of the energy of a matrix (mean over matrices" in shown
    assert "a mean over matrices with equal weights" in (tmp_path / "page.html").read_text()
    assert "of the energy that the library holds of a matrix (mean over matrices" in call(library.path)
    page, _ = report(library.path)
    assert "all tensors of an expert together" in page.render()


def test_interference_says_what_the_library_function_says(models, tmp_path):
    experts = [models[name] for name in ("math", "code", "law")]
    expected = survey(models["base"], {name: models[name] for name in ("math", "code", "law")})
    found = json.loads(call(*experts, "--base", models["base"], "--json"))
    assert found == json.loads(json.dumps(expected.to_dict()))
    shown = call(*experts, "--base", models["base"], "--html", tmp_path / "page.html")
    for part in ("Singular task interference by block", "after TSV-Merge", "Cosine of task vectors", "effective rank"):
        assert part in shown
    for advice in expected.advice:
        assert f"{advice.kind}: {advice.text}" in shown
    page = (tmp_path / "page.html").read_text()
    assert "layers.1.weight, the matrix with the most interference" in page
    assert page.count("<table") == 4


def test_layers_are_sampled_in_order_and_the_choice_is_stated(tmp_path):
    rng = torch.Generator().manual_seed(0)
    paths = []
    for name in ("base", "a", "b"):
        state = {f"model.layers.{layer}.weight": torch.randn(6, 5, generator=rng) for layer in range(11)}
        save_file(state, tmp_path / f"{name}.safetensors")
        paths.append(tmp_path / f"{name}.safetensors")
    shown = call(*paths[1:], "--base", paths[0])
    assert "model.layers: measured 4 of 11 layers, evenly spread: 0, 3, 7, 10 (--layers 0 measures all)" in shown
    places = [shown.index(f"\nmodel.layers.{layer} ") for layer in (0, 3, 7, 10)]
    assert places == sorted(places)
    found = json.loads(call(*paths[1:], "--base", paths[0], "--layers", 0, "--json"))
    assert [m["name"] for m in found["matrices"]] == [f"model.layers.{layer}.weight" for layer in range(11)]
    assert found["layers"] == {}


def test_names_may_be_given_and_one_expert_alone_has_a_spectrum(models):
    shown = call(f"solo={models['math']}", "--base", models["base"])
    assert "solo" in shown
    assert "by block" not in shown


def test_a_library_stands_for_its_base_and_experts(models, tmp_path):
    Library.build(models["base"], {name: models[name] for name in ("math", "code")}, tmp_path / "lib")
    found = json.loads(call(tmp_path / "lib", "--json", "--html", tmp_path / "page.html"))
    assert found["experts"] == ["math", "code"]
    assert found["truncated"]
    assert "their spectra end at the stored rank" in (tmp_path / "page.html").read_text()


def test_a_library_without_experts_is_named(models, tmp_path):
    library = Library.build(models["base"], {"math": models["math"]}, tmp_path / "lib")
    library.remove("math")
    with pytest.raises(InputError, match="expected at least one expert"):
        call(tmp_path / "lib")


def test_a_base_compared_with_itself(models):
    assert "nothing can interfere" in call(models["base"], "--base", models["base"])


def test_mistakes_are_named(models, tmp_path):
    with pytest.raises(InputError, match="no directory"):
        call(models["base"], "--html", tmp_path / "nowhere" / "page.html")
    with pytest.raises(InputError, match="a directory; name the file"):
        call(models["base"], "--html", tmp_path)
    with pytest.raises(CheckpointError, match="no such file"):
        call(tmp_path / "nothing.safetensors")
    with pytest.raises(InputError, match="two checkpoints are called 'x'"):
        call(f"x={models['math']}", f"x={models['code']}", "--base", models["base"])


def no_constant(name):
    raise AssertionError(f"{name} is not JSON")


def test_json_knows_no_nan(models, tmp_path):
    save_file({name: torch.full((3, 2), float("nan")) for name in ("a", "b")}, tmp_path / "bad.safetensors")
    shown = call(tmp_path / "bad.safetensors", tmp_path / "bad.safetensors", "--json")
    assert json.loads(shown, parse_constant=no_constant)["apart"][0]["distance"] is None


@pytest.mark.parametrize("tensor", ["layers.1.weight", "norm.weight"])
def test_experts_that_are_not_finite_are_named(models, tmp_path, tensor):
    state = load_file(models["law"])
    state[tensor].view(-1)[3] = float("nan")
    save_file(state, tmp_path / "bad.safetensors")
    with pytest.raises(CheckpointError, match=f"bad, .*bad.safetensors: tensor '{tensor}' contains NaN"):
        call(models["math"], tmp_path / "bad.safetensors", "--base", models["base"])


def test_what_is_infinite_everywhere_did_not_change(models, tmp_path):
    paths = {}
    for name, path in models.items():
        paths[name] = tmp_path / f"masked-{name}.safetensors"
        save_file(load_file(path) | {"mask": torch.full((4, 4), float("-inf"))}, paths[name])
    found = json.loads(
        call(paths["math"], paths["code"], "--base", paths["base"], "--json"), parse_constant=no_constant
    )
    plain = json.loads(call(models["math"], models["code"], "--base", models["base"], "--json"))
    assert found["cosine"] == plain["cosine"]
    assert len(found["matrices"]) == 2


def test_layers_the_base_has_not_are_noted(models, tmp_path):
    further = {f"layers.{n}.weight": torch.ones(4, 4) for n in range(2, 6)}
    save_file(load_file(models["law"]) | further, tmp_path / "deep.safetensors")
    arguments = (models["math"], tmp_path / "deep.safetensors", "--base", models["base"])
    note = "deep: not compared, since the base has no tensor of that name and shape: layers.2.weight, layers.3.weight, "
    assert f"{note}layers.4.weight and 1 more" in call(*arguments, "--html", tmp_path / "page.html")
    assert note in (tmp_path / "page.html").read_text()
    assert json.loads(call(*arguments, "--json"))["left_out"] == {"deep": sorted(further)}
    experts = {"math": models["math"], "deep": tmp_path / "deep.safetensors"}
    Library.build(models["base"], experts, tmp_path / "lib")
    assert note in call(tmp_path / "lib")


@pytest.mark.parametrize("fraction", ["nan", "0", "1.5", "-1"])
def test_impossible_fractions_are_refused(models, fraction):
    with pytest.raises(InputError, match=r"rank_fraction must be in \(0, 1\]"):
        call(models["math"], "--base", models["base"], "--rank-fraction", fraction)
