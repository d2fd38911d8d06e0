"""The commands of `merganser library` and `extract-lora`, called as a user would."""

import json

import pytest
import torch
import typer
from safetensors.torch import save_file
from typer.testing import CliRunner

from merganser.checkpoints.opening import open as open_checkpoint
from merganser.cli import library, lora
from merganser.errors import CheckpointError, InputError

runner = CliRunner()
LORA = typer.Typer()
LORA.command("extract-lora")(lora.command)
LORA.command("merge-lora")(lora.merge_command)


@pytest.fixture
def models(tmp_path):
    rng = torch.Generator().manual_seed(0)
    base = {"a.weight": torch.randn(40, 36, generator=rng), "norm.weight": torch.ones(8)}
    paths = {}
    for index, name in enumerate(("base", "math", "code")):
        noise = {key: 0.1 * index * torch.randn(tensor.shape, generator=rng) for key, tensor in base.items()}
        (tmp_path / name).mkdir()
        save_file({key: base[key] + noise[key] for key in base}, tmp_path / name / "model.safetensors")
        paths[name] = str(tmp_path / name)
    return paths


def call(app, *arguments, code=0):
    result = runner.invoke(app, list(map(str, arguments)))
    if code == 0 and result.exception is not None:
        raise result.exception
    assert result.exit_code == code, result.output
    return result


def build(models, tmp_path, *options):
    pairs = [f"{name}={models[name]}" for name in ("math", "code")]
    return call(library.app, "build", tmp_path / "lib", *pairs, "--base", models["base"], "--json", *options)


def test_a_library_from_beginning_to_end(models, tmp_path):
    built = json.loads(build(models, tmp_path, "--rank-fraction", "0.2").stdout.splitlines()[-1])
    assert set(built["experts"]) == {"math", "code"}
    lib = tmp_path / "lib"
    call(library.app, "add", lib, f"again={models['math']}")
    assert "again" in call(library.app, "list", lib).stdout
    call(library.app, "remove", lib, "again")
    call(library.app, "extract", lib, "math", tmp_path / "out")
    assert open_checkpoint(tmp_path / "out").read("a.weight").shape == (40, 36)
    report = json.loads(call(library.app, "extract", lib, "math", tmp_path / "ad", "--as", "lora", "--json").stdout)
    assert (report["left_out"], report["whole"]) == ([], ["norm.weight"])
    call(library.app, "merge", lib, tmp_path / "merged", "-e", "math", "-e", "code", "--scale", "0.5")
    assert open_checkpoint(tmp_path / "merged").names()
    assert call(library.app, "verify", lib).stdout.count("ok") == 3
    (lib / "experts/math.safetensors").write_bytes(b"broken")
    findings = json.loads(call(library.app, "verify", lib, "--json", code=1).stdout)
    assert [f["part"] for f in findings if not f["sound"]] == ["math"]


def test_removals_are_repeatable_and_stay_inside(models, tmp_path):
    build(models, tmp_path, "--rank-fraction", "0.2")
    lib = tmp_path / "lib"
    manifest = json.loads((lib / "library.json").read_text())
    left = dict(manifest, experts={"code": manifest["experts"]["code"]})
    (lib / "library.json").write_text(json.dumps(left))  # as after a kill between manifest and file
    assert call(library.app, "verify", lib, code=1)
    call(library.app, "remove", lib, "math")
    assert not (lib / "experts/math.safetensors").exists()
    call(library.app, "verify", lib)
    with pytest.raises(InputError, match="has no expert 'math'"):
        call(library.app, "remove", lib, "math")
    (tmp_path / "precious.txt").write_text("mine")
    left["experts"]["code"]["file"] = "../precious.txt"
    (lib / "library.json").write_text(json.dumps(left))
    with pytest.raises(CheckpointError, match="not the name of a file inside"):
        call(library.app, "remove", lib, "code")
    assert (tmp_path / "precious.txt").read_text() == "mine"


def test_a_base_of_another_checksum_is_not_called_sound(models, tmp_path):
    build(models, tmp_path)
    path = tmp_path / "lib/library.json"
    content = json.loads(path.read_text())
    assert "ok   base" in call(library.app, "verify", tmp_path / "lib").stdout
    path.write_text(json.dumps(content | {"base_sha256": "0" * 64}))
    assert "BAD  base: " in call(library.app, "verify", tmp_path / "lib", code=1).stdout
    path.write_text(json.dumps({key: content[key] for key in content if key != "base_sha256"} | {"version": 1}))
    assert "?    base: " in call(library.app, "verify", tmp_path / "lib").stdout


def test_budgets_are_sizes(models, tmp_path):
    built = json.loads(build(models, tmp_path, "--budget", "8kB", "--dtype", "int8").stdout.splitlines()[-1])
    assert sum(expert["bytes"] for expert in built["experts"].values()) <= 8000


def test_errors_reach_the_caller(models, tmp_path):
    with pytest.raises(InputError, match="NAME=CKPT"):
        call(library.app, "build", tmp_path / "lib", "math", "--base", models["base"])
    with pytest.raises(InputError, match="'math' is given twice"):
        call(library.app, "build", tmp_path / "lib", "math=x", "math=y", "--base", models["base"])
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InputError, match="cannot be created"):
        call(library.app, "build", tmp_path / "file", f"math={models['math']}", "--base", models["base"])
    with pytest.raises(CheckpointError, match="not an expert library"):
        call(library.app, "list", models["base"])
    with pytest.raises(CheckpointError, match="nowhere: no such directory"):
        call(library.app, "list", tmp_path / "nowhere")
    build(models, tmp_path)
    with pytest.raises(InputError, match="choose checkpoint or lora"):
        call(library.app, "extract", tmp_path / "lib", "math", tmp_path / "x", "--as", "gguf")


def test_adapters_from_the_command_line(models, tmp_path):
    for name in ("math", "code"):
        arguments = ("extract-lora", models[name], tmp_path / f"{name}-lora", "--base", models["base"], "--rank", 4)
        assert "rank 4" in call(LORA, *arguments).stdout
    call(LORA, "merge-lora", tmp_path / "math-lora", tmp_path / "code-lora", tmp_path / "both", "--rank", 6)
    assert json.loads((tmp_path / "both/adapter_config.json").read_text())["r"] == 6
    done = call(LORA, "merge-lora", tmp_path / "math-lora", tmp_path / "again", "--json").stdout
    found = json.loads(done)
    assert (found["event"], found["path"], found["rank"]) == ("done", str(tmp_path / "again"), 4)
    assert found["energy"] == 1.0
    with pytest.raises(InputError, match="not a dtype"):
        call(LORA, "extract-lora", models["math"], tmp_path / "y", "--base", models["base"], "--dtype", "int8")


def test_a_library_of_codes_and_its_report(models, tmp_path):
    build(models, tmp_path, "--budget", "2500", "--code", "levels", "--code", "factors")
    lib = tmp_path / "lib"
    call(library.app, "add", lib, f"again={models['math']}", "--budget", "900")
    shown = json.loads(call(library.app, "list", lib, "--json").stdout)
    assert shown["experts"]["again"]["bytes"] <= 900
    assert sum(each["bytes"] for each in shown["experts"].values()) <= 3400
    caption, header, *lines = call(library.app, "report", lib).stdout.splitlines()
    assert caption == "Size and error of each layer"
    assert header.split("  ")[0] == "layer"
    assert header.endswith("KiB  bits per entry  % of energy lost  stored as")
    assert [line.split()[0] for line in lines] == ["a", "norm"]
    told = json.loads(call(library.app, "report", lib, "--expert", "again", "--tensors", "--json").stdout)
    assert {each["expert"] for each in told["tensors"]} == {"again"}
    assert {each["code"] for each in told["tensors"]} <= {"levels", "factors", "whole", "dropped"}
    assert 0 < told["layers"][0]["lost"] < 1
    assert "again: a.weight" in call(library.app, "report", lib, "-e", "again", "--tensors").stdout
    report = call(
        library.app, "extract", lib, "math", tmp_path / "ad", "--as", "lora", "--budget", "600", "--low-rank-only"
    )
    assert "rank" in report.stdout
    assert json.loads((tmp_path / "ad/adapter_config.json").read_text())["bias"] == "none"
    with pytest.raises(InputError, match="add --as lora"):
        call(library.app, "extract", lib, "math", tmp_path / "out", "--budget", "600")
    with pytest.raises(InputError, match="has no expert 'nobody'"):
        call(library.app, "report", lib, "-e", "nobody")


def test_layers_are_reported_in_natural_order():
    from merganser.library.reporting import TensorReport, sum_by_layer

    names = [f"layers.{number}.weight" for number in (0, 1, 10, 2)]
    found = sum_by_layer([TensorReport("math", name, "levels", 8, 64, 0.0, 1.0) for name in names])
    assert [layer.layer for layer in found] == ["layers.0", "layers.1", "layers.2", "layers.10"]
