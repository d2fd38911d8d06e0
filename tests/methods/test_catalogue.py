import re

import pytest

from merganser.methods.catalogue import catalogue, describe
from merganser.methods.registry import registry


def test_every_method_says_what_it_does():
    rows = catalogue()
    assert [row.name for row in rows] == sorted(registry())
    for row in rows:
        assert row.summary
        assert row.description
        assert not row.summary.endswith(".")
        assert "|" not in row.summary
        for parameter in row.parameters:
            assert parameter.help, f"{row.name}.{parameter.name}"


@pytest.mark.parametrize("row", catalogue(), ids=lambda row: row.name)
def test_every_method_says_where_it_comes_from(row):
    """A paper with its year, or mergekit; the two that are older than any paper on merging aside."""
    source = re.search(r"arXiv:\d{4}\.\d{5}|\b(19|20)\d\d\b|mergekit", row.description)
    assert source or row.name in ("ema", "passthrough")


def test_a_method_in_words():
    row = describe("ties")
    assert (row.base, row.models, row.reach) == ("required", "1+", "reduce_map")
    density = next(p for p in row.parameters if p.name == "density")
    assert (density.default, density.bounds, density.per_model) == ("0.2", "0 … 1", True)
    scale = next(p for p in row.parameters if p.name == "scale")
    assert scale.aliases == ("lambda",)
    scope = next(p for p in row.parameters if p.name == "scope")
    assert scope.bounds == "tensor | global"


@pytest.mark.parametrize(("name", "models"), [("slerp", "1–2"), ("nearswap", "1"), ("model_stock", "2+")])
def test_numbers_of_models(name, models):
    assert describe(name).models == models


def test_required_parameters_and_other_names():
    assert describe("slerp").parameters[0].default == "required"
    assert describe("ramplus_tl").name == "ram_plus"
    assert describe("passthrough").parameters[0].default == "none"
    assert {p.name: p.default for p in describe("svc").parameters}["exclude"] == "none"
