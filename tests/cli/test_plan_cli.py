"""`merganser plan` on small checkpoints."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from typer.testing import CliRunner

import merganser as mg
from merganser.cli import build
from merganser.cli.commands import load_command
from merganser.cli.mergekit_flags import FLAGS
from merganser.errors import InputError
from merganser.report.collapsing import collapse

RECIPE = """
method: ties
base: base
models: [a, {path: b, parameters: {weight: 0.5}}]
parameters: {density: 0.4}
overrides:
  - {match: "*.norm", method: linear}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    names = [f"layers.{layer}.{part}" for layer in range(11) for part in ("w", "norm")]
    for model in ("base", "a", "b"):
        (tmp_path / model).mkdir()
        save_file({name: torch.ones(2, 2) for name in names}, tmp_path / model / "model.safetensors")
    file = tmp_path / "recipe.yml"
    file.write_text(RECIPE)
    return file


def call(*arguments: object) -> str:
    result = CliRunner().invoke(build(), list(map(str, arguments)))
    if result.exception is not None:
        raise result.exception
    return result.stdout


def test_a_plan_is_what_a_dry_run_shows(recipe: Path, tmp_path: Path) -> None:
    assert call("plan", recipe, "--json") == call("merge", recipe, tmp_path / "out", "--dry-run", "--json")
    assert call("plan", recipe) == call("merge", recipe, tmp_path / "out", "--dry-run")
    assert "linear × 11, ties × 11" in call("plan", recipe)
    assert not (tmp_path / "out").exists()


def test_notes_are_wrapped_between_words(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe.write_text("merge_method: ties\nbase_model: base\nmodels: [{model: a}]\nrandom_seed: 1\n")
    wide = [line for line in call("plan", recipe).splitlines() if line.startswith("note")]
    monkeypatch.setenv("COLUMNS", "60")
    lines = call("plan", recipe).splitlines()
    notes = lines[[line.startswith("note") for line in lines].index(True) :]
    assert max(map(len, notes)) <= 60
    assert " ".join(" ".join(notes).split()) == " ".join(" ".join(wide).split())
    assert len(notes) > len(wide)


def test_tensors_have_method_sources_and_effective_parameters(recipe: Path) -> None:
    outputs = json.loads(call("plan", recipe, "--tensors", "--json"))["outputs"]
    assert [each["name"] for each in outputs][-4:] == ["layers.9.norm", "layers.9.w", "layers.10.norm", "layers.10.w"]
    last = outputs[-1]
    assert last["method"] == "ties"
    assert [source["tensor"] for source in last["sources"]] == ["layers.10.w"] * 2
    assert last["base"]["tensor"] == "layers.10.w"
    assert last["parameters"]["density"] == [0.4, 0.4]
    assert last["parameters"]["weight"] == [1.0, 0.5]
    assert last["parameters"]["scale"] == 1.0  # a default


def test_tensors_that_are_alike_share_a_line_below_their_rule(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    lines = call("plan", recipe, "--tensors").splitlines()
    assert max(map(len, lines)) <= 60
    weights = lines.index("    layers.[0-10].w")
    rule = max(i for i in range(weights) if lines[i].startswith("ties of "))
    assert "weight 1.0/0.5" in " ".join(" ".join(lines[rule:weights]).split())
    assert sum("layers." in line for line in lines) == 2


def test_a_recipe_that_is_wrong_is_refused(recipe: Path) -> None:
    recipe.write_text("method: tise\nmodels: [a, b]")
    with pytest.raises(InputError, match="did you mean 'ties'"):
        call("plan", recipe)


def test_names_collapse_to_ranges() -> None:
    rows = [(f"l.{layer}.e.{expert}.w", "m") for layer in range(3) for expert in (0, 1, 5)]
    assert collapse([*rows, ("l.00.w", "m"), ("h4.w", "m"), ("l.7.w", "n")]) == [
        ("l.[0-2].e.[0-1,5].w", "m"),
        ("l.00.w", "m"),
        ("h4.w", "m"),
        ("l.7.w", "n"),
    ]


NAMES = st.lists(st.sampled_from(["a", "b", "0", "1", "2", "3", "10"]), min_size=1, max_size=4).map(".".join)


@given(st.dictionaries(NAMES, st.sampled_from("xy")))
def test_no_name_is_lost_or_made_up(rows: dict[str, str]) -> None:
    def expand(name: str) -> list[str]:
        names = [""]
        for part in name.split("."):
            numbers = [part]
            if part.startswith("["):
                bounds = [list(map(int, each.split("-"))) for each in part.strip("[]").split(",")]
                numbers = [str(n) for low, *high in bounds for n in range(low, (high or [low])[0] + 1)]
            names = [f"{begun}.{number}" if begun else number for begun in names for number in numbers]
        return names

    collapsed = collapse(rows.items())
    assert sorted((name, rest) for each, rest in collapsed for name in expand(each)) == sorted(rows.items())


@pytest.mark.parametrize("dialect", ["native", "mergekit"])
def test_seed_dtype_and_shard_size_come_before_the_recipes(recipe: Path, tmp_path: Path, dialect: str) -> None:
    written = {"native": "method: linear\nmodels: [a, b]\noutput: {dtype: float32}\nseed: 3\n"}
    written["mergekit"] = "merge_method: linear\nmodels: [{model: a}, {model: b}]\ndtype: float32\n"
    recipe.write_text(written[dialect] + "# a comment stays\n")
    plain = json.loads(call("plan", recipe, "--json"))
    options = ("--dtype", "bf16", "--shard-size", "100", "--seed", "7")
    changed = json.loads(call("plan", recipe, "--json", *options))
    assert changed["bytes_out"] * 2 == plain["bytes_out"]
    assert (plain["shards"], changed["shards"]) == (1, 2)
    call("merge", recipe, tmp_path / "out", *options)
    assert mg.open(tmp_path / "out").spec("layers.0.w").dtype == torch.bfloat16
    card = (tmp_path / "out" / "README.md").read_text()
    assert "# a comment stays\n# changed when it was run to seed: 7, output.dtype: bf16, output.shard_size: 100" in card


def test_the_seed_on_the_command_line_is_the_seed(recipe: Path, tmp_path: Path) -> None:
    save_file({f"layers.{i}.w": torch.zeros(2, 2) for i in range(11)}, tmp_path / "base" / "model.safetensors")
    text = "method: dare_linear\nbase: base\nmodels: [a]\nparameters: {density: 0.5}\noutput: {exclude: ['*.norm']}\n"
    for seed in (5, 6):
        recipe.write_text(f"{text}seed: {seed}\n")
        call("merge", recipe, tmp_path / f"written-{seed}")
    recipe.write_text(text)
    call("merge", recipe, tmp_path / "given", "--seed", 5)
    names = ("given", "written-5", "written-6")
    weights = {each: (tmp_path / each / "model.safetensors").read_bytes() for each in names}
    assert weights["given"] == weights["written-5"] != weights["written-6"]


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [("--dtype", "float15", "did you mean 'float16'"), ("--shard-size", "big", "big"), ("--shard-size", "0", "a byte")],
)
def test_wrong_options_are_refused(recipe: Path, option: str, value: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        call("plan", recipe, option, value)


def test_options_of_mergekit_get_a_hint(recipe: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError) as refused:
        call("merge", recipe, tmp_path / "out", "--cuda", "--lazy-unpickle", "--out-shard-size=5B")
    lines = [line.strip() for line in str(refused.value).splitlines()]
    assert lines[0] == "--cuda is an option of mergekit; write --device cuda"
    assert lines[1].startswith("--lazy-unpickle is an option of mergekit; leave it out")
    assert lines[2].startswith("--out-shard-size is an option of mergekit; write --shard-size SIZE")


def test_hints_name_options_that_there_are() -> None:
    known = {option for each in ("merge", "plan") for p in load_command(each).params for option in p.opts}
    for flag, hint in FLAGS.items():
        assert flag not in known
        assert set(re.findall(r"(?<!\w)--[a-z-]+", hint)) <= known, flag


def test_the_native_form_of_a_mergekit_recipe(recipe: Path, tmp_path: Path) -> None:
    recipe.write_text(
        "merge_method: linear\nmodels: [{model: a}, {model: b, parameters: {weight: 3}}]\ndtype: float16\n"
    )
    printed = call("plan", recipe, "--native")
    assert json.loads(call("plan", recipe, "--native", "--json"))["output"] == {"dtype": "float16"}
    (tmp_path / "native.yml").write_text(printed)
    assert "merge_method" not in printed
    call("merge", recipe, tmp_path / "one")
    call("merge", tmp_path / "native.yml", tmp_path / "two")
    weights = [(tmp_path / out / "model.safetensors").read_bytes() for out in ("one", "two")]
    assert weights[0] == weights[1]


def test_the_translation_in_the_reference_is_what_is_printed(recipe: Path) -> None:
    before, after = (Path(__file__).parents[2] / "docs/recipes.md").read_text().split("becomes\n\n```text\n")
    recipe.write_text(re.findall(r"```yaml\n(.*?)```", before, re.DOTALL)[-1])
    assert call("plan", recipe, "--native") == after.partition("```")[0]
