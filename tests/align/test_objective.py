"""The objective, its gradient and its line search against definitions written out."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch
from align_networks import attention, mlp, noisy_copies, resnet, trained_like, vgg
from hypothesis import given
from hypothesis import strategies as st
from numpy.polynomial import Polynomial

from merganser.align.assignments import Assignments
from merganser.align.frank_wolfe import linear_maximum
from merganser.align.initialisation import hard_placing, start_placings
from merganser.align.objective import best_step
from merganser.align.permutations import apply, random
from merganser.align.placements import HardImage, Placement, SoftImage
from merganser.align.terms import TermLayout

NETWORKS = {
    "mlp": lambda: mlp(5, 7, 6, 3),
    "batch": lambda: resnet(4, "batch"),
    "vgg": lambda: vgg(4),
    "attention": lambda: attention(12, 3),
}


@pytest.fixture(params=NETWORKS)
def case(request):
    """Three models of a network in float64, at random doubly stochastic placings."""
    module, symmetry = NETWORKS[request.param]()
    layout = TermLayout.of(symmetry)
    states = [{n: t.double() for n, t in trained_like(module, seed).items()} for seed in range(3)]
    weights = [layout.weights(state, torch.float64) for state in states]
    placings = start_placings(layout, 3, "sinkhorn", 0, frozenset())
    return symmetry, layout, states, weights, placings


def dense(layout, placing):
    """Every placing as a matrix, rows new, columns old."""
    return {
        path: torch.eye(len(p), dtype=torch.float64)[p] if p.dim() == 1 else p.double() for path, p in placing.items()
    }


def image(layout, weights, matrices):
    """W ×₁ P₁ … ×_k P_k by einsum over dense matrices."""
    images = []
    for term, array in zip(layout.terms, weights, strict=True):
        for axis, path in enumerate(term.paths):
            array = torch.einsum("ui,i...->u...", matrices[path], array.movedim(axis, 0)).movedim(0, axis)
        images.append(array)
    return images


def pairs_objective(layout, weights, matrices):
    """The thesis' definition: the sum over pairs of models."""
    images = [image(layout, w, m) for w, m in zip(weights, matrices, strict=True)]
    return sum((a * b).sum() for p, q in combinations(images, 2) for a, b in zip(p, q, strict=True))


def test_running_sum_equals_the_sum_over_pairs(case):
    _, layout, _, weights, placings = case
    placement = Placement(layout, [SoftImage(layout, w, p) for w, p in zip(weights, placings, strict=True)])
    expected = pairs_objective(layout, weights, [dense(layout, p) for p in placings])
    assert placement.objective() == pytest.approx(float(expected), rel=1e-12)


def test_objective_is_the_inner_product_of_permuted_states(case):
    symmetry, layout, states, weights, _ = case
    chosen = [random(symmetry, seed) for seed in range(3)]
    placement = Placement(
        layout, [HardImage(layout, w, hard_placing(layout, p)) for w, p in zip(weights, chosen, strict=True)]
    )
    mapped = [apply(symmetry, p, s) for p, s in zip(chosen, states, strict=True)]
    expected = sum(float((a[n] * b[n]).sum()) for a, b in combinations(mapped, 2) for n in symmetry.objective)
    assert placement.objective() == pytest.approx(expected, rel=1e-12)


def test_gradient_equals_pairs_and_autograd(case):
    _, layout, _, weights, placings = case
    placement = Placement(layout, [SoftImage(layout, w, p) for w, p in zip(weights, placings, strict=True)])
    matrices = [{path: m.requires_grad_() for path, m in dense(layout, p).items()} for p in placings]
    pairs_objective(layout, weights, matrices).backward()
    for model in range(3):
        gradient = placement.all_profits(model)
        for root in layout.trees:
            for path, profit in placement.linearise(model, root).profits.items():
                expected = matrices[model][path].grad.numpy().reshape(profit.shape)
                np.testing.assert_allclose(profit, expected, rtol=1e-10, atol=1e-12)
                np.testing.assert_allclose(gradient[path], expected, rtol=1e-10, atol=1e-12)


def test_gradient_equals_the_four_contributions_of_the_thesis():
    """Two layers, written as in the chapter: rows of W_ℓ and columns of W_{ℓ+1}, over all other models."""
    _, symmetry = mlp(4, 6, 5, 3)
    layout = TermLayout.of(symmetry)
    states = [{n: t.double() for n, t in trained_like(mlp(4, 6, 5, 3)[0], s).items()} for s in range(3)]
    placings = start_placings(layout, 3, "sinkhorn", 1, frozenset())
    weights = [layout.weights(s, torch.float64) for s in states]
    placement = Placement(layout, [SoftImage(layout, w, p) for w, p in zip(weights, placings, strict=True)])
    p1 = [p["h1",].double().T for p in placings]  # the thesis' P maps from the universe: its rows are old
    p2 = [p["h2",].double().T for p in placings]
    w1, b1, w2 = ([s[name] for s in states] for name in ("0.weight", "0.bias", "2.weight"))
    expected = torch.zeros(6, 6, dtype=torch.float64)
    for q in (1, 2):
        expected += w1[0] @ w1[q].T @ p1[q] + torch.outer(b1[0], b1[q]) @ p1[q]
        expected += w2[0].T @ p2[0] @ p2[q].T @ w2[q] @ p1[q]
    np.testing.assert_allclose(placement.linearise(0, "h1").profits["h1",], expected.T.numpy(), rtol=1e-10)


def test_line_search_is_the_exact_quartic(case):
    _, layout, _, weights, placings = case
    placement = Placement(layout, [SoftImage(layout, w, p) for w, p in zip(weights, placings, strict=True)])
    vertices = linear_maximum(placement, Assignments())
    along = placement.along(vertices)
    start, end = [dense(layout, p) for p in placings], [dense(layout, v) for v in vertices]
    steps = np.linspace(0, 1, 201)
    values = []
    for t in steps:
        mixed = [{k: (1 - t) * a[k] + t * b[k] for k in a} for a, b in zip(start, end, strict=True)]
        values.append(float(pairs_objective(layout, weights, mixed)))
    np.testing.assert_allclose(along(steps), values, rtol=1e-9, atol=1e-9)
    best = best_step(along)
    assert along(best) >= max(values) - 1e-9
    slope = sum(
        float((torch.from_numpy(placement.all_profits(m)[k].reshape(b[k].shape)) * (b[k] - a[k])).sum())
        for m, (a, b) in enumerate(zip(start, end, strict=True))
        for k in a
    )
    assert along.deriv()(0.0) == pytest.approx(slope, rel=1e-9)
    assert slope > 0
    for soft, vertex in zip(placement.images, vertices, strict=True):
        soft.step(vertex, best)
    placement.refresh()
    assert placement.objective() == pytest.approx(along(best), rel=1e-12)


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=7))
def test_best_step_beats_a_fine_grid(coefficients):
    along = Polynomial(coefficients)
    best = best_step(along)
    assert 0.0 <= best <= 1.0
    assert along(best) >= along(np.linspace(0, 1, 500)).max() - 1e-7


def test_held_models_are_constant():
    module, symmetry = mlp(5, 7, 6, 3)
    layout = TermLayout.of(symmetry)
    states, _ = noisy_copies(trained_like(module, 0), symmetry, 2, noise=0.5, seed=0)
    weights = [layout.weights({n: t.double() for n, t in s.items()}, torch.float64) for s in states]
    placings = start_placings(layout, 2, "sinkhorn", 0, frozenset({0}))
    images = [HardImage(layout, weights[0], placings[0]), SoftImage(layout, weights[1], placings[1])]
    placement = Placement(layout, images, frozenset({0}))
    vertices = linear_maximum(placement, Assignments())
    assert vertices[0] is None
    along = placement.along(vertices)
    assert along(0.0) == pytest.approx(placement.objective(), rel=1e-12)
    images[1].step(vertices[1], 0.3)
    placement.refresh()
    assert along(0.3) == pytest.approx(placement.objective(), rel=1e-12)
