"""Orthogonal matching pursuit against a loop over targets in float64, with numpy's least squares at every step."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from merganser.kernels import pursuit
from merganser.kernels.pursuit import pursue


def naive(target: np.ndarray, atoms: np.ndarray, terms: int) -> tuple[list[int], np.ndarray]:
    chosen: list[int] = []
    residual, coefficients = target, np.zeros(0)
    for _ in range(terms):
        fit = np.abs(atoms @ residual)
        fit[chosen] = -1
        chosen.append(int(fit.argmax()))
        coefficients = np.linalg.lstsq(atoms[chosen].T, target, rcond=None)[0]
        residual = target - atoms[chosen].T @ coefficients
    return chosen, coefficients


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 40), st.integers(2, 12), st.integers(1, 8))
def test_equals_the_naive_loop(seed, count, width, terms):
    rng = np.random.default_rng(seed)
    atoms = rng.normal(size=(count, width)) * rng.uniform(0.1, 10, size=(count, 1))
    targets = rng.normal(size=(7, width))
    indices, coefficients = pursue(torch.from_numpy(targets), torch.from_numpy(atoms), terms)
    steps = min(terms, count)
    assert indices.shape == coefficients.shape == (7, steps)
    for row, target in enumerate(targets):
        useful = min(steps, width)  # after so many independent atoms nothing is left to fit
        expected, weights = naive(target, atoms, useful)
        assert indices[row, :useful].tolist() == expected
        np.testing.assert_allclose(coefficients[row, :useful].numpy(), weights, rtol=1e-6, atol=1e-8)
        np.testing.assert_allclose(coefficients[row, useful:].numpy(), 0, atol=1e-6)


def test_finds_planted_combinations_in_float32(monkeypatch):
    monkeypatch.setattr(pursuit, "BATCH", 16)  # several batches
    generator = torch.Generator().manual_seed(0)
    atoms = torch.randn(300, 128, generator=generator)
    picked = torch.stack([torch.randperm(300, generator=generator)[:4] for _ in range(50)])
    weights = torch.rand(50, 4, generator=generator) + 1
    targets = torch.einsum("bk,bkd->bd", weights, atoms[picked])
    indices, coefficients = pursue(targets, atoms, 4)
    assert torch.equal(indices.sort(1).values, picked.sort(1).values)
    torch.testing.assert_close(torch.einsum("bk,bkd->bd", coefficients, atoms[indices]), targets, rtol=1e-4, atol=1e-4)


def test_atoms_that_depend_on_each_other_get_no_weight():
    atoms = torch.tensor([[1.0, 0.0, 0.0], [2.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    indices, coefficients = pursue(torch.tensor([[3.0, 4.0, 0.0]]), atoms, 3)
    assert torch.isfinite(coefficients).all()
    torch.testing.assert_close(coefficients @ atoms[indices[0]], torch.tensor([[3.0, 0.0, 0.0]]))


@pytest.mark.parametrize("count", [0, 1])
def test_few_targets(count):
    indices, coefficients = pursue(torch.ones(count, 2), torch.eye(2), 5)
    assert indices.shape == coefficients.shape == (count, 2)
