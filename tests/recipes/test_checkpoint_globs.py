"""A glob over checkpoints stands for its matches, in the order of their step numbers."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import merganser as mg
from merganser.errors import RecipeError

STEPS = (100, 900, 1000, 20000)


@pytest.fixture
def run(tmp_path):
    (tmp_path / "run").mkdir()
    for step in STEPS:
        directory = tmp_path / "run" / f"checkpoint-{step}"
        directory.mkdir()
        save_file({"w": torch.full((3,), float(step))}, directory / "model.safetensors", {"format": "pt"})
    (tmp_path / "run" / "checkpoint-log.txt").write_text("not a checkpoint")
    return tmp_path


def recipe(directory, models, method="wsm", **more):
    path = directory / "recipe.yml"
    path.write_text(str({"method": method, "models": models, **more}))
    return mg.recipes.load(path)


def labels(found):
    return [model.label for model in found.parts[0].slices[0].models]


def test_matches_are_in_the_order_of_their_steps(run):
    found = recipe(run, ["run/checkpoint-*"])
    assert labels(found) == [f"run/checkpoint-{step}" for step in STEPS]
    found = recipe(run, ["run/checkpoint-?00", "run/checkpoint-1000"])
    assert labels(found) == ["run/checkpoint-100", "run/checkpoint-900", "run/checkpoint-1000"]


def test_a_resumed_run_continues_the_first(run):
    (run / "run-resumed").mkdir()
    for step in STEPS[2:]:
        (run / "run" / f"checkpoint-{step}").rename(run / "run-resumed" / f"checkpoint-{step}")
    first, resumed = ([f"{name}/checkpoint-{step}" for step in steps] for name, steps in
                      (("run", STEPS[:2]), ("run-resumed", STEPS[2:])))  # fmt: skip
    assert labels(recipe(run, ["run*/checkpoint-*"])) == [*first, *resumed]
    (run / "run" / "checkpoint-final").mkdir()
    assert labels(recipe(run, ["run/checkpoint-*"])) == [*first, "run/checkpoint-final"]


def test_the_merge_is_that_of_the_list(run):
    globbed = mg.run(recipe(run, ["run/checkpoint-*"], parameters={"last": 2, "schedule": "linear"}), run / "a")
    assert torch.equal(mg.open(globbed)["w"], torch.full((3,), (1000.0 + 20000.0) / 2))


def test_a_run_of_distributed_checkpoints(tmp_path):
    """A trainer writes model and optimiser; the average is of the model over the last steps."""
    walk = {step: torch.randn(4, 3, generator=torch.Generator().manual_seed(step)) for step in (800, 1000, 1200, 9000)}
    for step, weight in walk.items():
        state = {"model": {"w": weight}, "optimizer": {"state": {"w": {"exp_avg": weight}}}, "step": step}
        dcp.save(state, checkpoint_id=tmp_path / f"step-{step}", no_dist=True)
    entry = {"path": "step-*", "window": 8000}
    found = mg.open(mg.run(recipe(tmp_path, [entry], parameters={"schedule": "sqrt"}), tmp_path / "out"))
    assert found.names() == ["w"]
    first, rate = 1 - (1 / 3) ** 0.5, 1 - (2 / 3) ** 0.5
    expected = walk[1000] + first * (walk[1200] - walk[1000]) + rate * (walk[9000] - walk[1200])
    torch.testing.assert_close(found["w"], expected)


def test_settings_of_the_entry_are_those_of_every_match(run, monkeypatch):
    found = recipe(run, [{"path": "run/checkpoint-*00", "weight": 2.0}], "linear")
    assert [model.parameters for model in found.parts[0].slices[0].models] == [{"weight": 2.0}] * 4
    monkeypatch.chdir(run)
    loaded = mg.recipes.load("method: linear\nmodels: [run/checkpoint-9*]")
    assert labels(loaded) == ["run/checkpoint-900"]


@pytest.mark.parametrize(("window", "kept"), [(0, 1), (19000, 2), (19100, 3), (50000, 4)])
def test_a_window_counts_steps_back_from_the_last(run, window, kept):
    found = recipe(run, [{"path": "run/checkpoint-*", "window": window}])
    assert labels(found) == [f"run/checkpoint-{step}" for step in STEPS[-kept:]]


def test_the_step_is_the_last_number_of_a_name(run):
    """Names of runs have numbers of their own."""
    for run_number, step in ((9, 100), (2, 200), (1, 300)):
        (run / f"seed{run_number}-step{step}").mkdir()
    found = recipe(run, [{"path": "seed*-step*", "window": 100}])
    assert sorted(labels(found)) == ["seed1-step300", "seed2-step200"]


def test_a_window_needs_a_number_and_steps(run):
    with pytest.raises(RecipeError, match=r"models\[0\]\.window: expected a number of steps, got 'all'"):
        recipe(run, [{"path": "run/checkpoint-*", "window": "all"}])
    (run / "run" / "checkpoint-best").mkdir()
    with pytest.raises(RecipeError, match="checkpoint-best' has no step number in its name"):
        recipe(run, [{"path": "run/checkpoint-*", "window": 100}])
    with pytest.raises(RecipeError, match="only a glob over checkpoints"):
        recipe(run, [{"path": "run/checkpoint-100", "window": 100}])


def test_names_of_models_in_memory_are_no_globs(run, monkeypatch):
    monkeypatch.chdir(run)
    models = {"run/checkpoint-*": {"w": torch.ones(3)}, "b[0]": {"w": torch.zeros(3)}}
    assert torch.equal(mg.merge(models, "linear")["w"], torch.full((3,), 0.5))
    assert torch.equal(mg.merge(list(models.values()), "linear")["w"], torch.full((3,), 0.5))


def test_a_path_with_brackets_is_a_path(run):
    odd = run / "model[1]"
    odd.mkdir()
    save_file({"w": torch.ones(3)}, odd / "model.safetensors", {"format": "pt"})
    assert labels(recipe(run, [str(odd), "run/checkpoint-100"], "linear"))[0] == str(odd)


def test_no_match_is_an_error_that_says_where(run):
    with pytest.raises(RecipeError, match=r"models\[1\]: no checkpoint matches 'run/step-\*' \(looked beside"):
        recipe(run, ["run/checkpoint-100", "run/step-*"])


@pytest.mark.parametrize("own", [{"weight": [0.1, 0.2, 0.3, 0.4]}, {"parameters": {"weight": [0.5, 1]}}])
def test_a_list_beside_a_glob_is_refused(run, own):
    with pytest.raises(RecipeError, match=r"models\[0\]: weight is a list beside a glob with 4 matches; write each"):
        recipe(run, [{"path": "run/checkpoint-*", **own}], "linear")
    found = recipe(run, ["run/checkpoint-*"], "linear", parameters={"weight": [0.5, 1]})
    assert len(labels(found)) == 4


def test_layers_beside_a_glob_are_no_list_of_values(run):
    models = [{"path": "run/checkpoint-*", "layers": [0, 4], "weight": 1}]
    slices = mg.recipes.load({"method": "linear", "slices": [{"models": models}]}, run).parts[0].slices
    assert [model.label for model in slices[0].models] == [f"run/checkpoint-{step}" for step in STEPS]
