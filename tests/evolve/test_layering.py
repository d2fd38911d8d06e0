"""Which layer stands where: split points and stacks of other models' layers, against the tensors they must give."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import merganser as mg
from merganser.errors import InputError
from merganser.evolve import loading
from merganser.evolve.layering import layer_options, stack_layers
from merganser.evolve.runs import recipe, start
from merganser.evolve.space import SearchParameter, Space
from merganser.recipes.settings import Gradient

pytest.importorskip("pymoo")

LABELS = ("math", "code")
TEMPLATE = {"method": "task_arithmetic", "base": "b", "models": [{"path": "m"}, {"path": "c"}]}
SPLIT = Space({"weight": SearchParameter(0, 1, per="model", split=True)}, models=LABELS, depth=7)
STACK = """
base: ./base
models: {math: ./math, code: ./code}
method: passthrough
space: {layers: {reach: 1}}
tasks: {quiz: {kind: multiple-choice, data: ./quiz.jsonl, subset: 8}}
objectives: [quiz]
search: {population: 6, generations: 1}
"""


def test_a_split_has_two_values_a_model_and_one_layer_for_all():
    names = [variable.name for variable in SPLIT.variables]
    assert names == ["weight.math[0]", "weight.math[1]", "weight.code[0]", "weight.code[1]", "weight.split"]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=5, max_size=5))
def test_every_layer_has_the_value_of_its_side_of_the_split(genome):
    values = SPLIT.decode(np.array(genome))
    assert values["weight.split"] in range(1, 7)
    assert SPLIT.decode(SPLIT.encode(values)) == pytest.approx(values)
    document = SPLIT.recipe(TEMPLATE, values)
    for label, model in zip(LABELS, document["models"], strict=True):
        over_depth = Gradient(tuple(model["weight"]))
        for layer in range(7):
            wanted = values[f"weight.{label}[{int(layer >= values['weight.split'])}]"]
            assert over_depth.at(layer / 6) == pytest.approx(wanted)


@pytest.mark.parametrize(
    "parameter",
    [
        lambda: Space({"weight": SearchParameter(0, 1, split=True)}, depth=2),
        lambda: SearchParameter(0, 1, split=True, points=3),
        lambda: SearchParameter(choices=(0, 1), split=True),
        lambda: Space({"layers": SearchParameter(0, 1)}, depth=8),
        lambda: Space({"weight": SearchParameter(reach=1)}, depth=8),
        lambda: SearchParameter(reach=1, per="model"),
    ],
)
def test_what_is_no_genome_is_refused(parameter):
    with pytest.raises(InputError):
        parameter()


def test_runs_of_layers_become_slices():
    found = stack_layers(TEMPLATE, LABELS, ["math-1", "math+0", "code+0", "code-2", "math+1"])
    assert "models" not in found
    assert found["slices"] == [
        {"path": "m", "layers": [0, 2]},
        {"path": "c", "layers": [2, 3]},
        {"path": "c", "layers": [1, 2]},
        {"path": "m", "layers": [4, 5]},
    ]
    assert layer_options(["a"], 2) == ("a+0", "a-1", "a+1", "a-2", "a+2")


def test_a_study_stacks_layers_and_its_winner_is_the_model_that_was_asked(run_file, llamas, tmp_path):
    path = run_file(text=STACK)
    loaded = loading.load(path)
    assert [v.name for v in loaded.design.search_space.variables] == ["layers[0]", "layers[1]"]
    assert list(loaded.design.starts) == [{"layers[0]": f"{n}+0", "layers[1]": f"{n}+0"} for n in LABELS]
    study = start(path, tmp_path / "s.sqlite")
    assert not [trial.error for trial in study.trials() if trial.state == "failed"]
    endpoint = next(t for t in study.trials() if t.values == loaded.design.starts[0])
    mixed = next(t for t in study.trials() if len({value[:4] for value in t.values.values()}) == 2)
    for trial in (endpoint, mixed):
        out = mg.run(recipe(study, trial), tmp_path / f"out{trial.id}")
        written = load_file(out / "model.safetensors")
        live = loaded.evaluate.live.load(trial.values).state_dict()
        for place in range(2):
            pick = trial.values[f"layers[{place}]"]
            source = load_file(llamas / pick[:4] / "model.safetensors")
            layer = min(max(place + int(pick[4:]), 0), 1)
            for name in ("self_attn.q_proj.weight", "mlp.down_proj.weight", "input_layernorm.weight"):
                wanted = source[f"model.layers.{layer}.{name}"]
                assert written[f"model.layers.{place}.{name}"].equal(wanted)
                assert live[f"model.layers.{place}.{name}"].equal(wanted)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("passthrough", "linear"), "takes every layer from one model; use method: passthrough"),
        (("{reach: 1}", "{low: 0, high: 1}"), "space.layers: needs reach"),
        (("{reach: 1}", "{reach: -1}"), "space.layers: needs reach"),
    ],
)
def test_stacks_that_cannot_be_searched_are_refused(run_file, change, message):
    with pytest.raises(InputError, match=message):
        loading.load(run_file(change, text=STACK))


def test_as_many_points_as_layers(run_file):
    loaded = loading.load(run_file(("high: 1.5, per: model", "high: 1.5, per: model, points: layers")))
    names = [v.name for v in loaded.design.search_space.variables if v.parameter == "weight"]
    assert names == ["weight.math[0]", "weight.math[1]", "weight.code[0]", "weight.code[1]"]
