import math
import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from method_driver import RowBlocks, make_group

import merganser as mg
from merganser.errors import InputError, RecipeError
from merganser.methods import FAMILIES
from merganser.methods.base import Method, threshold
from merganser.methods.parameters import param
from merganser.methods.registry import (
    _REGISTRY,
    aliases,
    build,
    lookup,
    mergekit_defaults,
    parameters,
    register,
    registry,
)


@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 40))
def test_random_bits_are_addressed_by_element(rows, columns, step):
    group = make_group([np.zeros((rows, columns), np.float32)] * 2)
    for model in (0, 1):
        parts = [block.random_bits(model) for block in RowBlocks(group, step)]
        assert torch.equal(torch.cat(parts), group.random_bits(model))


def test_random_bits_are_uniform():
    bits = make_group([np.zeros(200_000, np.float32)]).random_bits(0)
    assert bits.dtype == torch.int16
    for probability in (0.01, 0.5, 0.9):
        share = (bits < threshold(probability)).float().mean().item()
        assert share == pytest.approx(probability, abs=0.005)
    assert threshold(0.0) == -(2**15)
    assert threshold(1.0) == 2**15


def test_unknown_names_get_a_suggestion():
    with pytest.raises(RecipeError, match="did you mean 'ties'"):
        lookup("tiess")
    with pytest.raises(RecipeError, match="unknown parameter 'densty'.*did you mean 'density'"):
        build(lookup("ties"), {"densty": 0.5}, ["a"])


@pytest.mark.parametrize(
    ("method", "values", "complaint"),
    [
        ("ties", {"density": 1.5}, "out of bounds"),
        ("ties", {"density": [0.1, 0.2, 0.3]}, "3 values for 2 models"),
        ("ties", {"scope": "layer"}, "not one of 'tensor', 'global'"),
        ("wsm", {"last": math.inf}, "expected a finite number, got inf"),
        ("wsm", {"last": math.nan}, "expected a finite number, got nan"),
        ("ties", {"scale": 10**5000}, "expected a finite number, got an integer that no float can hold"),
        ("ties", {"weight": [None, 1.0]}, "ties.weight of a: expected a number, got None"),
        ("ties", {"normalize": "yes"}, "expected true or false"),
        ("ties", {"scale": "1"}, "expected a number"),
        ("ties", {"scale": math.nan}, "finite"),
        ("consensus_ta", {"agree": 1.5}, "whole number"),
        ("slerp", {}, "needs the parameter 't'"),
        ("karcher", {"weight": -1}, "at least 0"),
    ],
)
def test_wrong_values_name_the_place(method, values, complaint):
    with pytest.raises(RecipeError, match=complaint):
        build(lookup(method), values, ["a", "b"])


def test_per_model_values_are_spread_or_taken_one_by_one():
    method = build(lookup("ties"), {"weight": [1, 2], "density": 0.5}, ["a", "b"])
    assert method.weight == (1.0, 2.0)
    assert method.density == (0.5, 0.5)
    assert build(lookup("passthrough"), {"scale": [None]}, ["a"]).scale == (None,)


def test_other_tools_names():
    assert aliases(lookup("ties"))["lambda"] == "scale"
    assert aliases(lookup("nuslerp")) == {"nuslerp_flatten": "flatten", "nuslerp_row_wise": "row_wise"}
    assert mergekit_defaults(lookup("ties")) == {"density": 1.0}
    assert mergekit_defaults(lookup("linear")) == {}


def test_numbers_of_models_and_the_base_are_checked():
    lookup("ties").check_inputs(1, True)
    with pytest.raises(RecipeError, match="base model is needed"):
        lookup("ties").check_inputs(2, False)
    with pytest.raises(RecipeError, match=r"here: expected 2 model\(s\) besides the base, got 3"):
        lookup("nuslerp").check_inputs(3, True, "here")


def test_names_are_taken_once():
    with pytest.raises(InputError, match=r"two methods are called 'ties'.*register\(replace=True\)"):
        register(lookup("ties"))
    assert list(registry()) == sorted(registry())
    assert "ramplus_tl" not in registry()


def test_a_method_may_be_registered_again(monkeypatch):
    """As a cell of a notebook does when it is run twice."""
    registry()  # all of them, before the copy that forgets the new one
    monkeypatch.setattr("merganser.methods.registry._REGISTRY", dict(_REGISTRY))

    def define(nickname, **options):
        @register(**options)
        @dataclass(frozen=True)
        class Mine(Method):
            name = "mine"
            also = (nickname,)

            def merge(self, group, state=None):
                return group.models[0]

        return Mine

    first = define("own")
    assert lookup("mine") is lookup("own") is first
    with pytest.raises(InputError, match="two methods are called 'mine'"):
        define("own")
    second = define("other", replace=True)
    assert lookup("mine") is lookup("other") is second
    assert parameters(second) == {}
    with pytest.raises(RecipeError, match="unknown method 'own'"):
        lookup("own")  # all names of the first go with it


def test_a_method_that_is_registered_again_has_its_new_parameters(monkeypatch):
    registry()  # all of them, before the copy that forgets the new one
    monkeypatch.setattr("merganser.methods.registry._REGISTRY", dict(_REGISTRY))

    @register
    @dataclass(frozen=True)
    class Kept(Method):
        name = "shifted"

        def merge(self, group, state=None):
            return group.models[0]

    models = [{"w": torch.zeros(2)}]
    assert mg.merge(models, "shifted")["w"].tolist() == [0, 0]

    @register(replace=True)
    @dataclass(frozen=True)
    class Shifted(Method):
        name = "shifted"
        by: float = param(1.0, "how far")

        def merge(self, group, state=None):
            return group.models[0] + self.by

    assert mg.merge(models, "shifted", by=5.0)["w"].tolist() == [5, 5]


def test_parameters_are_described():
    density = parameters(lookup("ties"))["density"]
    assert (density.kind, density.per_model, density.default, density.required) == (float, True, 0.2, False)
    assert parameters(lookup("slerp"))["t"].required
    assert parameters(lookup("passthrough"))["scale"].kind is float


def test_families_register_the_names_they_are_listed_with():
    registry()
    listed = {name: f"merganser.methods.{family}" for family, names in FAMILIES.items() for name in names}
    own = {name: method for name, method in _REGISTRY.items() if method.__module__.startswith("merganser.methods.")}
    assert {name: method.__module__ for name, method in own.items()} == listed


def test_a_rule_is_looked_up_without_importing_the_others():
    code = """
import sys
from merganser.errors import InputError
from merganser.methods.registry import lookup, register
lookup("ties")
assert "merganser.methods.tsv" not in sys.modules
from merganser.methods.base import Method
class Mine(Method):
    name = "tsv"
try:
    register(Mine)
except InputError as error:
    assert "two methods are called 'tsv'" in str(error)
else:
    raise AssertionError("a name of ours was taken")
assert lookup("tsv").__module__ == "merganser.methods.tsv"
"""
    subprocess.run([sys.executable, "-c", code], check=True)
