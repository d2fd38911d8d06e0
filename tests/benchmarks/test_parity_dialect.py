"""The comparison of recipes with mergekit sees what differs, and every parameter is in it."""

from __future__ import annotations

import pytest

from benchmarks.parity import make_models
from benchmarks.parity_dialect import changed, judge, other_cases, outcome, parameter_cases, plain
from merganser.recipes.mergekit_parameters import ACTING, KNOWN


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return make_models(tmp_path_factory.mktemp("models"))


def test_what_differs_is_silent_unless_it_is_noted(models):
    base, a, b, _ = models
    assert judge((a, a), None, base, ())["verdict"] == "same"
    assert judge((a, b), None, base, ())["verdict"] == "silent"
    assert judge((a, b), None, base, ("because",))["verdict"] == "noted"
    assert judge((a, None), None, base, ())["verdict"] == "silent"
    assert judge((None, None), None, base, ("refused",))["verdict"] == "same"
    assert judge((a, b), (base, base), base, ())["verdict"] == "same"
    assert judge((a, b), (a, base), base, ())["verdict"] == "silent"


def test_every_parameter_of_every_method_is_tried(models):
    base, *others = map(str, models)
    cases = list(parameter_cases(base, others))
    for method in ACTING:
        tried = {case.split(":")[0] for each, case, _ in cases if each == method}
        assert tried >= KNOWN
    assert len(list(other_cases(base, others, others[0]))) > 20


def test_our_side_runs_each_method(models, tmp_path):
    base, *others = map(str, models)
    for i, method in enumerate(ACTING):
        found, notes = outcome(plain(method, base, others), tmp_path / str(i))
        assert found is not None, notes
    refused, why = outcome(changed(plain("linear", base, others), "normalize", "maybe"), tmp_path / "none")
    assert refused is None
    assert "normalize" in why[0]
