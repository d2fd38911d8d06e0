"""IRT: planted parameters come back, the bound only rises, intervals cover, files round-trip."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from scipy.special import expit

from merganser.errors import InputError
from merganser.evolve import irt as irt_module
from merganser.evolve.irt import fit
from merganser.evolve.irt.fitting import checked, log_loss, sweep
from merganser.evolve.irt.logistic import regress
from merganser.evolve.irt.tinybenchmarks import load as load_tiny


def planted(models, items, dimensions, seed, *, sign=False):
    rng = np.random.default_rng(seed)
    gamma = rng.normal(size=(models, dimensions))
    a = rng.lognormal(0.2, 0.4, size=(items, dimensions))
    if sign:
        a *= rng.choice([-1, 1], size=a.shape)
    beta = rng.normal(size=items)
    p = expit(gamma @ a.T - beta)
    return (rng.random(p.shape) < p).astype(float), p, gamma, a, beta


def test_recovers_one_planted_dimension():
    answers, p, gamma, a, beta = planted(150, 300, 1, 0)
    model = fit(answers, dimensions=1)
    assert np.corrcoef(model.abilities[:, 0], gamma[:, 0])[0, 1] > 0.98
    assert np.corrcoef(model.items.difficulty, beta)[0, 1] > 0.95
    assert np.corrcoef(model.items.discrimination[:, 0], a[:, 0])[0, 1] > 0.7
    assert np.abs(model.probabilities() - p).mean() < 0.04


def test_recovers_planted_probabilities_in_three_dimensions_with_negative_discrimination():
    answers, p, gamma, *_ = planted(200, 400, 3, 1, sign=True)
    model = fit(answers)
    assert model.dimensions == 3
    assert model.validation[3] < model.validation[1]
    assert np.abs(model.probabilities() - p).mean() < 0.06
    # abilities are defined up to a linear map: a regression from ours to the planted ones explains them
    ours = np.column_stack([model.abilities, np.ones(len(gamma))])
    residual = gamma - ours @ np.linalg.lstsq(ours, gamma, rcond=None)[0]
    assert (residual.var(0) < 0.1 * gamma.var(0)).all()


def test_superfluous_dimensions_do_no_harm():
    answers, *_ = planted(100, 200, 1, 2)
    held = np.random.default_rng(0).random(answers.shape) < 0.1
    losses = [log_loss(fit(answers, ~held, dimensions=d), answers, held) for d in (1, 15)]
    assert losses[1] < losses[0] + 0.005


def test_missing_answers_are_ignored():
    answers, *_ = planted(60, 80, 1, 3)
    mask = np.random.default_rng(0).random(answers.shape) > 0.3
    flipped = np.where(mask, answers, 1 - answers)
    with_nan = np.where(mask, answers, np.nan)
    reference = fit(answers, mask, dimensions=2)
    for other in (fit(flipped, mask, dimensions=2), fit(with_nan, dimensions=2)):
        np.testing.assert_array_equal(reference.abilities, other.abilities)


def test_bit_for_bit_the_same_again():
    answers, *_ = planted(40, 60, 2, 4)
    first, second = fit(answers, dimensions=3), fit(torch.from_numpy(answers), dimensions=3)
    np.testing.assert_array_equal(first.abilities, second.abilities)
    np.testing.assert_array_equal(first.items.embedding, second.items.embedding)


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 8), st.integers(1, 12), st.integers(1, 4), st.integers(0, 1000))
def test_the_bound_never_falls(models, items, dimensions, seed):
    rng = np.random.default_rng(seed)
    answers = rng.integers(0, 2, (models, items)).astype(float)
    known = rng.random(answers.shape) < 0.8
    known[0, 0] = True
    bounds = sweep(*checked(answers, known, dimensions, "cpu"), dimensions, 30, -np.inf).bounds
    assert (np.diff(bounds) > -1e-8 * np.abs(bounds[1:])).all()


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_constant_answers_stay_finite(value):
    model = fit(np.full((3, 5), value))
    assert np.isfinite(model.probabilities()).all()
    assert np.abs(model.probabilities() - value).max() < 0.5


def test_laplace_intervals_cover_the_truth():
    answers, _, gamma, a, beta = planted(300, 120, 1, 6)
    known = irt_module.IRT(gamma, irt_module.Items(a, beta), irt_module.Normal(np.zeros(1), np.ones(1)))
    inside = [
        low <= truth <= high
        for row, truth in zip(answers, gamma[:, 0], strict=True)
        for low, high in [known.ability(row).interval(0.9)]
    ]
    assert 0.85 < np.mean(inside) < 0.95
    low, high = fit(answers, dimensions=1).intervals(0.9)
    assert (low < high).all()


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 30), st.integers(1, 4), st.floats(0.1, 5), st.integers(0, 1000))
def test_newton_equals_a_general_optimiser(rows, columns, precision, seed):
    rng = np.random.default_rng(seed)
    design, offset, mean = rng.normal(size=(rows, columns)), rng.normal(size=rows), rng.normal(size=columns)
    answers = rng.integers(0, 2, rows)

    def loss(x):
        z = design @ x + offset
        return (np.logaddexp(0, z) - answers * z).sum() + precision / 2 * ((x - mean) ** 2).sum()

    reference = minimize(loss, np.zeros(columns), method="BFGS", options={"gtol": 1e-8}).x
    ours = regress(design, offset, answers, mean, precision)
    np.testing.assert_allclose(ours.mean, reference, atol=1e-4)


def test_maximum_likelihood_survives_separable_answers():
    posterior = regress(np.array([[1.0], [2.0], [-1.0]]), 0.0, [1, 1, 0])
    assert np.isfinite(posterior.mean).all()
    assert posterior.mean[0] > 5


def test_ability_of_a_new_model():
    answers, p, *_ = planted(200, 400, 2, 7)
    model = fit(answers[:-1], dimensions=2)
    seen = np.arange(0, 400, 2)
    ability = model.ability(answers[-1, seen], seen)
    assert np.abs(model.probabilities(ability.mean) - p[-1]).mean() < 0.08


def test_save_and_load(tmp_path):
    answers, *_ = planted(20, 30, 2, 8)
    model = fit(answers)
    model.save(tmp_path / "model.safetensors")
    again = irt_module.IRT.load(tmp_path / "model.safetensors")
    np.testing.assert_array_equal(model.probabilities(), again.probabilities())
    assert dict(again.validation) == dict(model.validation)
    np.testing.assert_array_equal(again.intervals()[0], model.intervals()[0])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fit([0, 1]), "models × items"),
        (lambda: fit([[0.0, 2.0]]), r"\[0, 1\]"),
        (lambda: fit([[0.0, 1.0]], dimensions=16), "between 1 and 15"),
        (lambda: fit([[0.0, 1.0]], mask=[[1]]), "mask has shape"),
        (lambda: fit([[np.nan]]), "missing"),
        (lambda: irt_module.IRT.load("absent.safetensors"), "not a file"),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(InputError, match=message):
        call()


def tiny_file():
    rng = np.random.default_rng(0)
    return {
        "lb": {
            "irt_parameters": {"A": rng.normal(size=(1, 3, 10)), "B": rng.normal(size=(1, 1, 10))},
            "scenarios_position": {"arc": list(range(6)), "gsm8k": list(range(6, 10))},
            "seen_examples": [4, 1, 7, 4],
            "examples_weights": {"arc": np.array([0.5, 0.25, 0.25]), "gsm8k": np.array([1.0])},
        }
    }


@pytest.mark.parametrize("form", ["pickle", "npy"])
def test_reads_tinybenchmarks_once_converted(tmp_path, form):
    data = tiny_file()
    path, converted = tmp_path / "tiny", tmp_path / "tiny.npz"
    if form == "pickle":
        path.write_bytes(pickle.dumps(data))
    else:
        with path.open("wb") as file:
            np.save(file, data, allow_pickle=True)
    script = Path(__file__).parents[2] / "examples" / "convert_tinybenchmarks.py"
    subprocess.run([sys.executable, str(script), str(path), str(converted)], check=True)
    tiny = load_tiny(converted)
    theta = np.array([0.3, -1.0, 0.5])
    a, b = data["lb"]["irt_parameters"]["A"], data["lb"]["irt_parameters"]["B"]
    np.testing.assert_allclose(tiny.irt.probabilities(theta), expit((a * theta[:, None] - b).sum(axis=1)[0]))
    assert tiny.anchors["arc"].items.tolist() == [1, 4]
    assert tiny.anchors["arc"].weights.tolist() == [0.25, 0.75]
    assert tiny.scenarios["gsm8k"].tolist() == [6, 7, 8, 9]


class Bomb:
    def __reduce__(self):
        return (print, ("executed",))


@pytest.mark.parametrize("name", ["bomb.pkl", "bomb.npz", "bomb.npy"])
def test_pickles_are_not_read_whatever_they_are_called(tmp_path, capsys, name):
    (tmp_path / name).write_bytes(pickle.dumps({"lb": Bomb()}))
    with pytest.raises(InputError, match="can run code"):
        load_tiny(tmp_path / name)
    with (tmp_path / "inside.npz").open("wb") as file:
        np.savez(file, **{"lb/A": np.array([Bomb()], dtype=object)})
    with pytest.raises(InputError, match="expected an array of numbers, got object"):
        load_tiny(tmp_path / "inside.npz")
    assert "executed" not in capsys.readouterr().out


def test_no_product_code_unpickles():
    """Except torch checkpoints, whose reader is torch's own for weights alone."""
    for path in (Path(__file__).parents[2] / "src" / "merganser" / "evolve").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert "Unpickler" not in text, path
        assert "pickle.load" not in text, path
        assert "allow_pickle=True" not in text, path


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"answers": np.ones((2, 3))}, "contains no benchmarks"),
        ({"lbb/A": np.ones((1, 2, 3))}, "did you mean 'lbb'"),
        ({"lb/A": np.ones((1, 2, 3))}, "lacks B"),
        ({"lb/A": np.ones((2, 3)), "lb/B": np.ones((1, 1, 3))}, r"A has shape \(2, 3\)"),
        ({"lb/A": np.full((1, 2, 3), np.nan), "lb/B": np.ones((1, 1, 3))}, "not finite"),
        ({"lb/A": np.ones((1, 2, 3)), "lb/B": np.ones((1, 1, 3)), "lb/scenarios/x": np.array([3])}, "from 0 below 3"),
        ({"lb/A": np.ones((1, 2, 3)), "lb/B": np.ones((1, 1, 3)), "lb/Theta": np.ones(3)}, "Theta has shape"),
    ],
)
def test_bad_tinybenchmarks_files(tmp_path, arrays, message):
    np.savez(tmp_path / "tiny.npz", **arrays)
    with pytest.raises(InputError, match=message):
        load_tiny(tmp_path / "tiny.npz")


@pytest.mark.parametrize("answers", [[[1, 0], [1]], [["yes", "no"]], "text"])
def test_answers_that_are_no_matrix_of_numbers(answers):
    with pytest.raises(InputError, match="matrix of numbers"):
        fit(answers)
