import numpy as np
import torch
from method_driver import run

rng = np.random.default_rng(9)
MODELS = [rng.standard_normal((6, 5)).astype(np.float32) for _ in range(3)]


def tensors(arrays):
    return tuple(torch.from_numpy(np.asarray(a, np.float32)) for a in arrays)


def test_fisher():
    information = [rng.random((6, 5)) for _ in MODELS]
    information = [np.where(np.arange(5) == 0, 0, f) for f in information]
    weight = np.array([1.0, 0.5, 2.0])
    weighted = np.stack([w * f for w, f in zip(weight, information, strict=True)])
    with np.errstate(invalid="ignore"):
        expected = (weighted * np.stack(MODELS)).sum(0) / weighted.sum(0)
    expected[:, 0] = np.average(np.stack(MODELS), axis=0, weights=weight)[:, 0]
    statistics = {"fisher": tensors(information)}
    for step in (None, 2):
        merged = run("fisher", MODELS, step=step, parameters={"weight": weight.tolist()}, statistics=statistics)
        np.testing.assert_allclose(merged, expected, atol=1e-5)


def test_fisher_without_statistics_is_a_mean():
    np.testing.assert_allclose(run("fisher", MODELS), np.mean(MODELS, axis=0), atol=1e-6)


def test_regmean_is_the_least_squares_fit():
    inputs = [rng.standard_normal((40, 5)) for _ in MODELS]
    grams = [x.T @ x / len(x) for x in inputs]
    stacked = np.concatenate(inputs)
    targets = np.concatenate([x @ m.T for x, m in zip(inputs, MODELS, strict=True)])
    expected = np.linalg.lstsq(stacked, targets, rcond=None)[0].T
    merged = run("regmean", MODELS, parameters={"alpha": 1.0}, statistics={"gram": tensors(grams)})
    np.testing.assert_allclose(merged, expected, atol=1e-5)


def test_regmean_shrinks_off_diagonals():
    grams = [x.T @ x for x in (rng.standard_normal((9, 5)) for _ in MODELS)]
    shrunk = [0.9 * g + 0.1 * np.diag(np.diag(g)) for g in grams]
    expected = sum(m @ g for m, g in zip(MODELS, shrunk, strict=True)) @ np.linalg.inv(sum(shrunk))
    np.testing.assert_allclose(run("regmean", MODELS, statistics={"gram": tensors(grams)}), expected, atol=1e-4)


def test_regmean_averages_where_no_model_saw_data():
    gram = np.diag([1.0, 2.0, 0.0, 0.0, 3.0])
    merged = run("regmean", MODELS, statistics={"gram": tensors([gram] * 3)})
    np.testing.assert_allclose(merged, np.mean(MODELS, axis=0), atol=1e-5)


def test_regmean_of_vectors_is_a_mean():
    models = [m[0] for m in MODELS]
    np.testing.assert_allclose(run("regmean", models), np.mean(models, axis=0), atol=1e-6)
