"""`merge` and `run` as a program calls them: which model is which, and what is said of arguments that are wrong."""

from __future__ import annotations

import os
import pickle
import re
import warnings
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor, nn

import merganser as mg
from merganser.errors import InputError


def state(value: float, **more: float) -> dict[str, Tensor]:
    return {name: torch.full((2,), each) for name, each in {"b": value, **more}.items()}


@pytest.mark.parametrize("opened", [state, lambda value: mg.open(state(value))])
def test_a_base_in_memory_is_not_taken_for_a_model(opened: Callable[[float], Any]) -> None:
    merged = mg.merge([opened(1.0)], "task_arithmetic", base=opened(0.0), weight=2.0)
    assert merged["b"].tolist() == [2, 2]


def test_a_model_may_be_labelled_like_the_path_of_the_base(checkpoint: Callable[..., Path]) -> None:
    base = str(checkpoint("base", state(0.0)))
    for model in (state(1.0), mg.open(state(1.0))):
        assert mg.merge({base: model}, "task_arithmetic", base=base, weight=2.0)["b"].tolist() == [2, 2]


def test_statistics_are_not_taken_for_a_model() -> None:
    models = {"a": state(1.0), "fisher of a": state(3.0)}
    fisher = {"fisher": [state(1.0), state(1.0)]}
    assert mg.merge(models, "fisher", statistics=fisher)["b"].tolist() == [2, 2]


def test_a_base_among_the_models_is_not_counted_twice(checkpoint: Callable[..., Path]) -> None:
    base, model = state(0.0), state(1.0)
    path = checkpoint("base", base)
    link = path.with_name("link")
    link.symlink_to(path)
    for models, same in (
        ([base, model], base),
        ([str(path), model], path),
        ([str(path), model], link),
        ([path / "model.safetensors", model], f"{path}/../base/model.safetensors"),
        ({"base": path, "x": model}, str(path)),
    ):
        merged = mg.merge(models, "task_arithmetic", base=same, normalize=True)  # type: ignore[arg-type]
        assert merged["b"].tolist() == [1, 1]


def test_opened_state_dicts_are_told_apart_and_left_as_they_are() -> None:
    first, second = mg.open(state(1.0)), mg.open(state(3.0))
    assert mg.merge([first, second])["b"].tolist() == [2, 2]
    assert first.label == second.label == "state dict"
    with pytest.raises(InputError, match=r"'b' contains NaN in models\[1\]|models\[1\].*'b' contains NaN"):
        mg.merge([first, mg.open(state(float("nan")))])


def test_labels_key_the_draws() -> None:
    def drawn(label: str, base: Any) -> Tensor:
        model = {"w": torch.ones(40, 40)}
        return mg.merge({label: model}, "dare_linear", base=base, density=0.5)["w"]

    zeros = {"w": torch.zeros(40, 40)}
    assert torch.equal(drawn("x", zeros), drawn("x", mg.open(zeros)))
    assert not torch.equal(drawn("x", zeros), drawn("y", zeros))


def test_the_same_path_twice_is_refused(checkpoint: Callable[..., Path]) -> None:
    path = checkpoint("a", state(1.0))
    with pytest.raises(InputError, match="two models have the same path"):
        mg.merge([path, path])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": -1}, "workers: expected a whole number of at least 1, got -1"),
        ({"workers": 0}, "workers: expected a whole number of at least 1, got 0"),
        ({"device": "foo"}, "device 'foo' is not usable here"),
        ({"device": "meta"}, "device 'meta' is not usable here"),
        ({"method": "linaer"}, "recipe: method: unknown method 'linaer'; did you mean 'linear'?"),
        ({"overrides": ["x"]}, "overrides[0]: expected a mapping, got 'x'"),
        ({"overrides": {"match": "*"}}, "overrides: expected a list, got a mapping"),
        ({"models": "ab"}, "models: expected a list or a mapping of models, got a single str"),
        ({"models": Path("ab")}, "models: expected a list or a mapping of models, got a single PosixPath"),
        ({"models": nn.Sequential(nn.Linear(2, 2))}, "got a single Sequential"),
        ({"models": [{}, {}]}, "the merge has no tensors: models[0] has none"),
        ({"output": {"exclude": "*"}}, "the merge has no tensors: everything is excluded"),
        (
            {"weight": {"models[0]": 1, "b*": 2}},
            "weight: expected a value for each of ['models[0]'], got",
        ),
        ({"models": [nn.LazyLinear(2)]}, "LazyLinear: 'weight' has no values yet; call the module once"),
        ({"models": [{"a._extra_state": None}]}, "'a._extra_state' is of type NoneType"),
    ],
)
def test_wrong_arguments_are_said_clearly(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        mg.merge(**{"models": [state(1.0)], **options})


@pytest.mark.parametrize("weights", [np.array([0.25, 0.75]), torch.tensor([0.25, 0.75]), (0.25, np.float32(0.75))])
def test_parameters_may_be_arrays(weights: Any) -> None:
    torch.testing.assert_close(mg.merge([state(1.0), state(2.0)], weight=weights), state(1.75))


def test_parameters_may_be_given_by_label() -> None:
    models = {"code": state(1.0), "math": state(2.0)}
    torch.testing.assert_close(mg.merge(models, weight={"math": 0.75, "code": 0.25}), state(1.75))
    torch.testing.assert_close(mg.merge(models, weight={"math": {"b": 3, "*": 1}, "code": 1})["b"], state(1.75)["b"])


def test_notes_are_warnings() -> None:
    with pytest.warns(UserWarning, match="parameters: weight for 'matth\\*' matches no tensor"):
        mg.merge([state(1.0)], weight={"matth*": 2, "*": 1})


def test_parametrised_weights_are_noted() -> None:
    def old(parametrise: Any) -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return nn.Sequential(parametrise(nn.Linear(3, 2)))

    makers = [
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))),
        lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(3, 2))),
        lambda: old(nn.utils.weight_norm),
        lambda: old(nn.utils.spectral_norm),
    ]
    for make in makers:
        with pytest.warns(UserWarning, match=r"1 weight\(s\) are parametrised, such as '0.weight'"):
            mg.merge([make(), make()])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mg.merge([{"conv.weight_g": torch.ones(2)}] * 2)


def test_floats_that_the_first_model_has_as_integers_are_noted() -> None:
    whole, half = {"b": torch.ones(2), "w": torch.full((2,), 3)}, {"b": torch.ones(2), "w": torch.full((2,), 0.5)}
    with pytest.warns(UserWarning, match=r"copied from models\[0\] alone, such as 'w' \(int64\[2\]\)"):
        assert mg.merge([whole, half])["w"].tolist() == [3, 3]
    assert mg.merge([half, whole])["w"].tolist() == [1.75, 1.75]


def test_misspelt_labels_are_an_error() -> None:
    models = {"code": state(1.0), "math": state(2.0)}
    message = "weight: expected a value for each of ['code', 'math'], got values for ['cdoe', 'maht']"
    with pytest.raises(InputError, match=re.escape(message)):
        mg.merge(models, weight={"cdoe": 0.75, "maht": 0.25})


def test_an_override_without_a_base_is_as_it_should_be() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        merged = mg.merge([state(1.0), state(3.0)], "ties", state(9.0), overrides=[{"match": "b", "method": "linear"}])
    assert merged["b"].tolist() == [2, 2]


def test_merging_in_inference_mode() -> None:
    with torch.inference_mode():
        merged = mg.merge([state(1.0), state(3.0)])
    assert merged["b"].tolist() == [2, 2]
    assert not merged["b"].is_inference()


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about its absence")
def test_a_device_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="device 'cuda' is not usable here"):
        mg.merge([state(1.0)], device="cuda")
    with pytest.raises(InputError, match="device 'cuda' is not usable here"):
        mg.run({"method": "linear", "models": ["a"]}, tmp_path / "out", device="cuda")


def test_the_advice_on_a_tensor_that_only_one_model_has_can_be_followed() -> None:
    models = [state(1.0), state(3.0, head=1.0)]
    with pytest.raises(InputError, match=r"output.exclude: \['head'\]"):
        mg.merge(models)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        merged = mg.merge(models, output={"exclude": ["head"]}, dtype="float64")
    assert merged["b"].dtype == torch.float64
    assert list(merged) == ["b"]


@pytest.mark.parametrize("name", ["out.bin", "out.pt", "out.pth", "out.ckpt"])
def test_torch_files_are_not_written(checkpoint: Callable[..., Path], tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match=f"{name}: torch files are read but not written; name .* out.safetensors"):
        mg.save(checkpoint("a", state(1.0)), tmp_path / name)
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("out", ["", ".", "/", "..", "a/.."])
@pytest.mark.parametrize("overwrite", [False, True])
def test_what_is_no_name_of_a_directory(
    checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str, overwrite: bool
) -> None:
    checkpoint("a", state(1.0))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="not a name for a new directory"):
        mg.run({"method": "linear", "models": ["a"]}, out, overwrite=overwrite)
    assert os.listdir() == ["a"]


def test_missing_parents_of_the_output_are_made(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    model = checkpoint("a", state(1.0))
    out = mg.run({"method": "linear", "models": [str(model)]}, tmp_path / "new" / "deep" / "out")
    assert torch.equal(mg.open(out).read("b"), state(1.0)["b"])
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot be created: .*file is not a directory"):
        mg.run({"method": "linear", "models": [str(model)]}, tmp_path / "file" / "out")


def test_save_writes_whatever_can_be_opened(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    tensors = {"w": torch.randn(3, 2), "steps": torch.tensor([7])}
    torch.save(tensors, tmp_path / "model.pt")
    written = mg.open(mg.save(tmp_path / "model.pt", tmp_path / "saved", dtype="bfloat16"))
    assert torch.equal(written.read("w"), tensors["w"].bfloat16())
    assert torch.equal(written.read("steps"), tensors["steps"])
    with pytest.raises(InputError, match=r"exists already; .*overwrite it \(overwrite=True\)"):
        mg.save(tensors, tmp_path / "saved")
    assert torch.equal(mg.open(mg.save(tensors, tmp_path / "saved", overwrite=True)).read("w"), tensors["w"])


def test_save_copies_codes_but_does_not_cast_them(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    codes = {"w.weight": torch.ones(2, 2, dtype=torch.int8), "w.scales": torch.ones(1, 1)}  # of an unknown form
    model = checkpoint("codes", codes)
    assert mg.open(mg.save(model, tmp_path / "copy")).spec("w.weight").dtype == torch.int8
    written = mg.open(mg.save(model, tmp_path / "cast", dtype="bfloat16"))
    assert written.spec("w.weight").dtype == torch.int8


@pytest.mark.parametrize("spelt", ["average", "link", "average/../average"])
def test_an_input_is_never_what_is_replaced(checkpoint: Callable[..., Path], tmp_path: Path, spelt: str) -> None:
    average, model = checkpoint("average", state(1.0)), checkpoint("model", state(3.0))
    (tmp_path / "link").symlink_to("average")
    recipe = {"method": "linear", "models": [str(tmp_path / spelt), str(model)]}
    with pytest.raises(InputError, match=r"average cannot be replaced: it is the input"):
        mg.run(recipe, average, overwrite=True)
    with pytest.raises(InputError, match="link cannot be replaced: it is the input"):
        mg.run(recipe, tmp_path / "link", overwrite=True)
    assert all(torch.equal(mg.open(average).read(name), value) for name, value in state(1.0).items())
    assert sorted(os.listdir(tmp_path)) == ["average", "link", "model"]


@pytest.mark.parametrize(("out", "reason"), [("here", "current directory"), ("models", "input"), ("link", "input")])
def test_what_is_in_use_is_not_replaced(
    checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str, reason: str
) -> None:
    model = checkpoint("models/a", state(1.0))
    (tmp_path / "here" / "below").mkdir(parents=True)
    (tmp_path / "link").symlink_to("models")
    monkeypatch.chdir(tmp_path / "here" / "below")
    inner = {"method": "linear", "models": [str(model)]}
    for models in ([str(model)], [{"recipe": inner}]):
        with pytest.raises(InputError, match=f"cannot be replaced: the {reason} .* is in it"):
            mg.run({"method": "linear", "models": models}, tmp_path / out, overwrite=True)
    assert sorted(os.listdir(tmp_path)) == ["here", "link", "models"]


def test_one_path_is_not_a_list_of_letters() -> None:
    with pytest.raises(InputError, match="expected a list or a mapping of models, got a single str"):
        mg.merge("adir", "linear")


def interrupted(recipe: dict[str, Any], out: Path) -> None:
    """A merge that stops after its first tensor."""

    def stop(progress: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        mg.run(recipe, out, workers=1, on_progress=stop)


def test_resume_wants_the_very_files_it_was_begun_with(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    base, tuned = (checkpoint(name, {"a": torch.zeros(2**20), "b": torch.ones(2**20)}) for name in ("base", "tuned"))
    recipe, out = {"method": "linear", "models": [str(base), str(tuned)]}, tmp_path / "out"
    interrupted(recipe, out)
    file, before = tuned / "model.safetensors", mg.open(tuned).fingerprint()
    with file.open("r+b") as weights:
        weights.seek(10_000)  # between the pages that a fingerprint looks at
        weights.write(b"\x01")
    assert mg.open(tuned).fingerprint() == before
    for _ in range(2):
        with pytest.raises(InputError, match=r"tuned/model.safetensors is not the file .*out.partial was started with"):
            mg.run(recipe, out, resume=True)
        os.utime(file, ns=(0, 0))  # as a copy of the same weights would have
    assert mg.run(recipe, out, overwrite=True) == out
    interrupted(recipe, tmp_path / "again")
    assert mg.run(recipe, tmp_path / "again", resume=True)


def test_a_broken_sidecar_is_an_error_before_work(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    base = checkpoint("base", state(0.0))
    (base / "tokenizer_config.json").write_text("{")
    recipe = {"method": "passthrough", "models": [str(base)], "output": {"chat_template": "chatml"}}
    with pytest.raises(InputError, match="base/tokenizer_config.json: not valid JSON"):
        mg.run(recipe, tmp_path / "out")
    assert not (tmp_path / "out.partial").exists()


def test_values_of_a_program_become_text_only_for_the_card(
    checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [str(checkpoint(name, state(value))) for name, value in (("one", 1.0), ("two", 3.0))]
    inner = {"method": "linear", "models": paths}
    document = {"method": "linear", "models": [{"recipe": inner, "weight": 0.25}, {"path": paths[1], "weight": 0.75}]}
    with monkeypatch.context() as without:
        without.setattr(yaml, "safe_dump", None)
        without.setattr(yaml, "load_all", None)
        assert mg.merge([state(1.0), state(3.0)])["b"].tolist() == [2, 2]
        prepared = mg.recipes.prepare(mg.recipes.load(document))
    copy = pickle.loads(pickle.dumps(prepared.plan))
    assert copy == prepared.plan
    card = (mg.run(document, tmp_path / "out") / "README.md").read_text()
    _, text = card.split("```yaml\n")
    assert yaml.safe_load(text.partition("```")[0]) == document


def test_later_changes_of_a_document_do_not_reach_its_recipe() -> None:
    document: dict[str, Any] = {"method": "linear", "models": ["a", "b"]}
    recipe = mg.recipes.load(document)
    document["models"].append("c")
    assert yaml.safe_load(recipe.text) == {"method": "linear", "models": ["a", "b"]}


def test_a_method_may_be_named_by_an_enumeration() -> None:
    class Rule(str, Enum):
        mean = "linear"

    recipe = mg.recipes.load({"method": Rule.mean, "models": ["a", "b"]})
    assert recipe.method == "linear"
    assert yaml.safe_load(recipe.text)["method"] == "linear"
