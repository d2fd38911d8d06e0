"""The sections on evolution say what their numbers say, whatever these are."""

from __future__ import annotations

import json

import pytest

from benchmarks.records import stored
from benchmarks.reporting import drawing, markdown
from benchmarks.reporting.parts import Figure, Table, Text
from benchmarks.reporting.sections.evolution import parts

RECORDS = ("evolve", "evolve_language")


@pytest.fixture(params=RECORDS)
def record(request):
    return request.param, stored(request.param)["results"]


def written(record, results):
    return " ".join(part.text for part in parts(record, results) if isinstance(part, Text))


def test_a_section_can_be_written_and_drawn(record):
    found = list(parts(*record))
    assert "nan" not in "\n".join(markdown.write(part) for part in found)
    assert {type(part) for part in found} == {Text, Table, Figure}
    figure = next(part for part in found if isinstance(part, Figure) and part.name.endswith("winners"))
    assert drawing.shows(drawing.render(figure), figure)


def test_points_of_different_fitness_do_not_cover_each_other(record):
    [figure] = [part for part in parts(*record) if isinstance(part, Figure) and part.name.endswith("winners")]
    for panel in figure.panels:
        places = [point for points in panel.series.values() for point in points]
        assert len(set(places)) == len(places)


def test_how_many_estimates_beat_the_guess_is_counted(record):
    name, results = record
    results["estimates"]["mae_of_the_endpoints_mean"] = 0.0
    assert "0 of the 84 estimates below are closer" in written(name, results)
    results["estimates"]["mae_of_the_endpoints_mean"] = 1.0
    assert "84 of the 84 estimates below are closer" in written(name, results)


def test_the_goal_of_the_overhead_follows_the_numbers(record):
    name, results = record
    few, full = "machinery_and_merging_over_asking", "machinery_and_merging_over_asking_full"
    results["overhead"] |= {few: 0.5, full: 0.2}
    assert "is met by neither" in written(name, results)
    results["overhead"] |= {few: 0.5, full: 0.002, "machinery_over_asking_full": 0.000093}
    text = written(name, results)
    assert "is met for a full evaluation." in text
    assert "0.0093 % of a full evaluation" in text, "what is small does not become nothing"


def test_a_coarse_error_is_called_so(record):
    name, results = record
    for search in ("winners", "larger"):
        results[search]["fitness"]["full"]["bootstrap_error"] = 0.01
    assert "says little" not in written(name, results)
    results["larger"]["fitness"]["full"]["bootstrap_error"] = 0.12
    text = written(name, results)
    assert "up to 12.0 points" in text
    assert "being within it says little" in text


def test_experts_that_did_not_get_better_are_named():
    results = stored("evolve_language")["results"]
    scores = results["fine_tuning"]["scores"]
    scores["arithmetic"]["arithmetic_asdiv_exact"] = scores["base"]["arithmetic_asdiv_exact"] = 0.0625
    assert "arithmetic, exact on ASDiv, % (6.25 → 6.25)" in written("evolve_language", results)
    for expert in results["experts"]:
        for name in scores[expert]:
            scores[expert][name] = scores["base"][name] + (-1 if name.endswith("nll") else 1)
    assert "All own scores improved." in written("evolve_language", results)


def test_transfer_is_stored_for_both_studies(record):
    _, results = record
    assert set(results["transfer"]["winners"]) == {"winners", "larger"}
    assert json.dumps(results["transfer"]).count("NaN") == 0
