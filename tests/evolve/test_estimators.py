"""Estimators equal their definitions computed naively, and keep their promise when abilities are linear."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from scipy.special import expit

from merganser.errors import InputError
from merganser.evolve import estimators, subsets
from merganser.evolve.blending import cross_validated_c, leave_out
from merganser.evolve.irt import IRT, Items, Normal, fit
from merganser.evolve.preparation import prepare, split
from merganser.evolve.tasks import StudyTask


def world(seed, items=60, dimensions=2, models=3):
    rng = np.random.default_rng(seed)
    gammas = rng.normal(size=(models, dimensions))
    irt = IRT(
        gammas,
        Items(rng.normal(size=(items, dimensions)), rng.normal(size=items)),
        Normal(np.zeros(dimensions), np.ones(dimensions)),
    )
    answers = (rng.random((models, items)) < irt.probabilities()).astype(float)
    return irt, answers, rng


def by_hand(irt, y, subset, known, logits_of, start, penalty):
    """Textbook version: a general optimiser on the likelihood, loops over items."""

    def loss(x):
        total = penalty(x)
        for i, answer in zip(subset.items, y, strict=True):
            z = logits_of(x, i)
            total += np.logaddexp(0, z) - answer * z
        return total

    x = minimize(loss, start, method="BFGS", options={"gtol": 1e-9}).x
    total = len(irt.items)
    unseen = [i for i in range(total) if i not in set(subset.items.tolist())]
    n = len(subset)
    return n / total * known + (1 - n / total) * np.mean([expit(logits_of(x, i)) for i in unseen])


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 500), st.integers(8, 30))
def test_equal_their_definitions(seed, size):
    irt, _, rng = world(seed)
    subset = subsets.irt_clustering(irt.items, size, seed=seed)
    y = (rng.random(size) < 0.6).astype(float)
    a, beta, gammas = irt.items.discrimination, irt.items.difficulty, irt.abilities

    mean = sum(w * v for w, v in zip(subset.weights, y, strict=True))
    assert estimators.naive(y, subset).value == pytest.approx(mean)

    ability = by_hand(
        irt, y, subset, y.mean(), lambda x, i: a[i] @ x - beta[i], np.zeros(2), lambda x: (x**2).sum() / 2
    )
    assert estimators.p_irt(y, subset, irt, fit="map").value == pytest.approx(ability, abs=1e-5)

    mixed = by_hand(
        irt,
        y,
        subset,
        mean,
        lambda x, i: a[i] @ (x @ gammas) - beta[i],
        np.full(3, 1 / 3),
        lambda x: ((x - 1 / 3) ** 2).sum() / (2 * 0.5**2),
    )
    assert estimators.mp_irt(y, subset, irt, gammas).value == pytest.approx(mixed, abs=1e-5)

    blended = estimators.Estimator("gmp-irt", irt, gammas, c=0.3)(y, subset).value
    assert blended == pytest.approx(0.3 * mean + 0.7 * mixed, abs=1e-5)
    blended = estimators.Estimator("gp-irt", irt, c=0.3, fit="map")(y, subset).value
    assert blended == pytest.approx(0.3 * mean + 0.7 * ability, abs=1e-5)


def test_maximum_likelihood_equals_a_general_optimiser():
    irt, answers, _ = world(3, items=200)
    subset = subsets.random(200, 100)
    y = answers[0, subset.items]
    a, beta = irt.items.discrimination, irt.items.difficulty
    reference = by_hand(irt, y, subset, y.mean(), lambda x, i: a[i] @ x - beta[i], np.zeros(2), lambda x: 0.0)
    assert estimators.p_irt(y, subset, irt).value == pytest.approx(reference, abs=1e-5)


@given(st.integers(0, 200))
@settings(max_examples=20, deadline=None)
def test_adaptive_c_is_the_limit_of_the_grid_search(seed):
    irt, answers, _ = world(seed)
    subset = subsets.random(60, 15, seed=seed)
    grid = np.linspace(0, 1, 4001)
    best = []
    for row in answers:
        y = row[subset.items]
        left, right = estimators.naive(y, subset).value, estimators.p_irt(y, subset, irt).value
        best.append(grid[np.abs(grid * left + (1 - grid) * right - row.mean()).argmin()])
    assert estimators.adaptive_c(answers, subset, irt) == pytest.approx(np.mean(best), abs=1e-3)


def test_bias_variance_c():
    assert estimators.bias_variance_c(0.1, 0.03) == pytest.approx(0.01 / 0.04)
    assert estimators.bias_variance_c(0.0, 0.1) == 0
    assert estimators.bias_variance_c(0.0, 0.0) == 0.5


def test_full_evaluation_is_exact():
    irt, answers, _ = world(5)
    everything = subsets.random(60, 60)
    for name in estimators.NAMES:
        estimator = estimators.Estimator(name, irt, irt.abilities)
        assert estimator(answers[1, everything.items], everything).value == pytest.approx(answers[1].mean())


def linear_world(seed, merges=60, items=800, dimensions=5):
    """Merges whose abilities are noisy mixtures of three endpoints' abilities."""
    rng = np.random.default_rng(seed)
    gammas = rng.normal(size=(3, dimensions))
    questions = Items(rng.lognormal(-0.5, 0.6, size=(items, dimensions)), rng.normal(size=items))
    irt = IRT(gammas, questions, Normal(np.zeros(dimensions), np.ones(dimensions)))
    mixtures = rng.dirichlet(np.ones(3), size=merges) + rng.normal(0, 0.1, (merges, 3))
    return irt, (rng.random((merges, items)) < irt.probabilities(mixtures @ gammas)).astype(float)


@pytest.mark.parametrize("size", [10, 20, 50])
def test_mp_irt_beats_p_irt_and_the_mean_when_abilities_are_linear(size):
    runs = []
    for seed in range(3):
        irt, answers = linear_world(seed)
        candidates = {
            "naive": estimators.Estimator("naive"),
            "p-irt": estimators.Estimator("p-irt", irt),
            "mp-irt": estimators.Estimator("mp-irt", irt, irt.abilities),
            "mp-irt mle": estimators.Estimator("mp-irt", irt, irt.abilities, fit="mle"),
            "gmp-irt": estimators.Estimator("gmp-irt", irt, irt.abilities),
        }
        chosen = [subsets.random(800, size, seed=s) for s in range(2)]
        runs.append(estimators.compare(candidates, answers, chosen))
    error = {name: np.mean([run[name] for run in runs]) for name in runs[0]}
    # seen with these seeds (naive, p-IRT, mp-IRT, its MLE, gmp-IRT): n = 10 .128 .138 .065 .115 .089,
    # n = 20 .083 .088 .053 .082 .064, n = 50 .055 .049 .037 .043 .043
    assert error["mp-irt"] < 0.85 * error["p-irt"]
    assert error["mp-irt"] < 0.85 * error["naive"]
    assert error["gmp-irt"] < 0.95 * min(error["naive"], error["p-irt"])
    if size == 10:
        assert error["mp-irt"] < 0.7 * error["mp-irt mle"]


def test_standard_errors_are_honest():
    irt, answers = linear_world(3, merges=200)
    subset = subsets.random(800, 30, seed=9)
    estimator = estimators.Estimator("mp-irt", irt, irt.abilities)
    scores = [(estimator(row[subset.items], subset), row.mean()) for row in answers]
    inside = [abs(e.value - truth) < 1.96 * e.error for e, truth in scores]
    assert np.mean(inside) > 0.85


def test_stability_is_the_mean_over_candidates_and_subsets():
    _, answers, _ = world(8)
    chosen = [subsets.random(60, 10, seed=s) for s in range(4)]
    found = estimators.stability(estimators.Estimator("naive"), answers, chosen)
    by_loop = [[abs(row.mean() - row[s.items].mean()) for s in chosen] for row in answers]
    np.testing.assert_allclose(found.errors, by_loop)
    assert found.epsilon == pytest.approx(np.mean(by_loop))
    assert found.worst == pytest.approx(np.mean(by_loop, axis=1).max())


def test_validation_error_is_small_for_the_true_model():
    irt, _, rng = world(9, items=400)
    gammas = rng.normal(size=(40, 2))
    answers = (rng.random((40, 400)) < irt.probabilities(gammas)).astype(float)
    assert estimators.validation_error(irt, answers, subsets.random(400, 100)) < 0.05


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda irt: estimators.Estimator("gmpirt", irt), "did you mean 'gmp-irt'"),
        (lambda irt: estimators.Estimator("p-irt"), "needs an IRT"),
        (lambda irt: estimators.Estimator("mp-irt", irt), "endpoints' abilities"),
        (lambda irt: estimators.Estimator("gp-irt", irt, c=2), r"c must lie in \[0, 1\]"),
        (lambda irt: estimators.naive([1, 0], subsets.random(5, 3)), "needs as many answers"),
    ],
)
def test_bad_estimators_are_refused(build, message):
    with pytest.raises(InputError, match=message):
        build(world(0)[0])


def simulated(seed, models, items=300):
    """Answers of models with known abilities in two dimensions: those to fit, and fifty to estimate."""
    rng = np.random.default_rng(seed)
    discrimination, difficulty = rng.lognormal(-0.3, 0.4, (items, 2)), rng.normal(size=items)
    p = 1 / (1 + np.exp(difficulty - 0.8 * rng.normal(size=(models + 50, 2)) @ discrimination.T))
    answers = (rng.random(p.shape) < p).astype(float)
    return answers[:models], answers[models:]


@pytest.mark.parametrize(("estimator", "c"), [("naive", 0.5), ("gp-irt", "adaptive"), ("gp-irt", "bias-variance")])
def test_items_chosen_by_an_irt_of_three_models_are_no_worse_than_random_ones(estimator, c):
    errors, inside, baseline = [], [], []
    for seed in range(3):
        seen, others = simulated(seed, 3)
        chosen, plain = (
            prepare("t", task, seed, {str(i): row[split("t", task, 0).pool] for i, row in enumerate(seen)})
            for task in (
                StudyTask(300, 60, "irt", estimator, c, dimensions=1),
                StudyTask(300, 60),
            )
        )
        assert 1 / (chosen.subset.weights**2).sum() > 50
        for row in others:
            pool = row[chosen.split.pool]
            found = chosen.estimator(pool[chosen.subset.items], chosen.subset)
            errors.append(found.value - pool.mean())
            inside.append(abs(errors[-1]) <= 1.96 * found.error)
            baseline.append(plain.estimator(pool[plain.subset.items], plain.subset).value - pool.mean())
    assert np.std(errors) < 1.15 * np.std(baseline)
    assert np.mean(inside) > 0.9


def test_c_is_judged_by_models_that_the_irt_has_not_seen():
    """Answers at random: an IRT explains those it saw, and says nothing of others, so the subset's mean is trusted."""
    answers = (np.random.default_rng(0).random((4, 200)) < np.array([0.2, 0.4, 0.6, 0.8])[:, None]).astype(float)

    def fitted(rows):
        return fit(rows, dimensions=1)

    def extract(irt):
        return subsets.irt_clustering(irt.items, 60)

    unseen = list(leave_out(answers, fitted, extract))
    assert len(unseen) == 4
    assert 0 <= cross_validated_c(iter(unseen)) <= 1
    assert cross_validated_c(iter(())) == 1, "nothing speaks for an IRT that could not be tried"


def test_a_likelihood_leaves_out_directions_that_the_items_do_not_tell_apart():
    rng = np.random.default_rng(0)
    discrimination = np.column_stack([rng.lognormal(0, 0.3, 40), rng.normal(0, 0.01, (40, 2))])
    irt = IRT(
        np.zeros((0, 3)), Items(discrimination, rng.normal(size=40)), Normal(np.array([0.2, -0.3, 0.4]), np.ones(3))
    )
    answers = (rng.random(40) < irt.probabilities(np.array([1.0, 0.0, 0.0]))).astype(float)
    found = irt.ability(answers, prior=False)
    np.testing.assert_allclose(found.mean[1:], [-0.3, 0.4], atol=0.1)
    np.testing.assert_allclose(np.diag(found.covariance)[1:], 1, atol=0.1)
    alone = IRT(np.zeros((0, 1)), Items(discrimination[:, :1], irt.items.difficulty), Normal(np.zeros(1), np.ones(1)))
    assert found.mean[0] == pytest.approx(alone.ability(answers, prior=False).mean[0], abs=0.05)
