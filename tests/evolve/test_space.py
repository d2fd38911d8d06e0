from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from merganser import recipes
from merganser.errors import InputError
from merganser.evolve.domains import Choices, Range
from merganser.evolve.space import SearchParameter, Space, key

MODELS = ("math", "code")
WEIGHT = {"weight": SearchParameter(0, 2, per="model")}
SPACE = Space(
    {
        **WEIGHT,
        "density": SearchParameter(0.1, 1.0, groups={"mlp": "*mlp*", "rest": "*"}, points=3),
        "rank": SearchParameter(1, 8, integer=True),
        "rate": SearchParameter(1e-4, 1.0, log=True),
        "normalize": SearchParameter(choices=(True, False)),
    },
    ("weight.math + 2 * weight.code <= 1.5", "weight.math >= 0.5 * weight.code - 0.1"),
    MODELS,
)
unit = st.lists(st.floats(0, 1), min_size=len(SPACE.variables), max_size=len(SPACE.variables))


def test_names_say_what_each_coordinate_sets():
    assert [v.name for v in SPACE.variables] == [
        "weight.math",
        "weight.code",
        *(f"density.{g}[{i}]" for g in ("mlp", "rest") for i in range(3)),
        "rank",
        "rate",
        "normalize",
    ]


@settings(max_examples=60, deadline=None)
@given(unit)
def test_decoding_stays_inside_and_encoding_inverts_it(genome):
    values = SPACE.decode(np.array(genome))
    assert 0 <= values["weight.math"] <= 2
    assert values["rank"] in range(1, 9)
    assert type(values["rank"]) is int
    assert 1e-4 <= values["rate"] <= 1
    again = SPACE.decode(SPACE.encode(values))
    assert again == pytest.approx(values)
    assert key(values) == key(dict(reversed(values.items())))


@settings(max_examples=60, deadline=None)
@given(unit)
def test_violations_equal_the_inequalities(genome):
    values = SPACE.decode(np.array(genome))
    a, b = values["weight.math"], values["weight.code"]
    np.testing.assert_allclose(SPACE.violations(values), [a + 2 * b - 1.5, 0.5 * b - 0.1 - a], atol=1e-12)


def test_every_integer_and_choice_has_an_equal_share():
    domain = Range(1, 8, integer=True)
    drawn = [domain.decode(u) for u in np.linspace(0, 1, 8001)[:-1]]
    assert set(np.bincount(drawn)[1:]) == {1000}


def test_a_genome_becomes_a_recipe():
    space = Space(
        {
            "weight": SearchParameter(0, 2, per="model", points=2),
            "density": SearchParameter(0, 1, groups={"mlp": "*mlp*"}),
            "lambda": SearchParameter(0, 2),
        },
        models=MODELS,
    )
    template = {
        "method": "ties",
        "base": "./base",
        "models": [{"path": "./math"}, {"path": "./code"}],
        "parameters": {"density": 0.5, "normalize": True},
    }
    values = {
        "weight.math[0]": 0.1,
        "weight.math[1]": 0.2,
        "weight.code[0]": 0.3,
        "weight.code[1]": 0.4,
        "density.mlp": 0.7,
        "lambda": 1.0,
    }
    document = space.recipe(template, values)
    assert document["models"] == [{"path": "./math", "weight": [0.1, 0.2]}, {"path": "./code", "weight": [0.3, 0.4]}]
    assert document["parameters"] == {"density": {"*mlp*": 0.7, "*": 0.5}, "normalize": True, "lambda": 1.0}
    assert "weight" not in template["models"][0]
    del document["parameters"]["lambda"]
    recipes.load(document)


def test_a_searched_method_takes_only_its_own_parameters():
    method = SearchParameter(choices=("linear", "ties"))
    space = Space({"method": method, **WEIGHT, "density": SearchParameter(0.1, 1)}, models=MODELS)
    template = {"method": "ties", "base": "./b", "models": [{"path": "./m"}, {"path": "./c"}]}
    values = {"method": "linear", "weight.math": 0.5, "weight.code": 1.0, "density": 0.3}
    linear = space.recipe(template, values)
    assert linear["method"] == "linear"
    assert linear["parameters"] == {}
    assert space.recipe(template, values | {"method": "ties"})["parameters"] == {"density": 0.3}


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Space({}), "empty"),
        (lambda: Space({**WEIGHT, "weight.math": SearchParameter(0, 1)}, models=MODELS), "twice"),
        (lambda: Space(WEIGHT), "no models are named"),
        (lambda: Range(1, 1), "higher high"),
        (lambda: Range(0, float("nan")), "higher high"),
        (lambda: Range(0.5, 2, integer=True), "whole ends"),
        (lambda: Range(0, 1, log=True), "above 0"),
        (lambda: Choices((1,)), "two or more"),
        (lambda: Choices((1, 1)), "two or more"),
        (lambda: SearchParameter(1, 3, integer=True, points=2), "interpolated"),
        (lambda: SearchParameter(0, 1, points=0), "at least 1"),
        (lambda: Space({"method": SearchParameter(0, 1)}), "one choice"),
        (lambda: Space(WEIGHT, ("weight.maths <= 1",), MODELS), "did you mean 'weight.math'"),
        (lambda: Space(WEIGHT, ("weight.math < 1",), MODELS), "expected one <= or >="),
        (lambda: Space(WEIGHT, ("weight.math == 1",), MODELS), "expected one <= or >="),
        (lambda: Space(WEIGHT, ("weight.math * weight.code <= 1",), MODELS), "cannot read"),
        (lambda: Space(WEIGHT, ("weight.math <= ",), MODELS), "one side is empty"),
        (lambda: Space(WEIGHT, ("1 <= 2",), MODELS), "does not depend"),
        (lambda: Space({"m": SearchParameter(choices=(1, 2))}, ("m <= 1",)), "is a choice"),
        (lambda: SPACE.encode({"weight.mat": 1}), "did you mean"),
        (lambda: SPACE.encode({"weight.math": 1}), "are missing"),
    ],
)
def test_impossible_spaces(build, message):
    with pytest.raises(InputError, match=message):
        build()
