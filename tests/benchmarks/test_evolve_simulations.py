"""The simulations of studies show what they are there for."""

from __future__ import annotations

from benchmarks.evolve_simulations import reranking, verdicts


def test_ranking_the_best_again_finds_better_ones():
    (once, error), (again, _) = reranking(0, 60), reranking(5, 60)
    assert again > once + 2 * error


def test_equal_models_are_seldom_called_better():
    assert verdicts(60, 0.0, 400)["better"] < 0.05
    assert verdicts(400, 0.2, 100)["better"] > 0.95
