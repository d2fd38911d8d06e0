import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from merganser.kernels import spheres

rng = np.random.default_rng(0)


def gram(vectors):
    return np.array([[float(x @ y) for y in vectors] for x in vectors])


def test_gram_matrix_in_pieces():
    vectors = rng.standard_normal((3, 5000)).astype(np.float32)
    tensors = [torch.from_numpy(v) for v in vectors]
    parts = [spheres.gram([t[i : i + 1700] for t in tensors]) for i in range(0, 5000, 1700)]
    np.testing.assert_allclose(
        spheres.combine(parts), vectors.astype(np.float64) @ vectors.T.astype(np.float64), rtol=1e-7
    )
    assert np.array_equal(spheres.combine(parts), spheres.combine(parts[::-1]))


def test_total_does_not_depend_on_threads():
    values = torch.from_numpy(rng.standard_normal(200_001).astype(np.float32))
    threads = torch.get_num_threads()
    try:
        sums = set()
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            sums.add(spheres.total(values))
    finally:
        torch.set_num_threads(threads)
    assert len(sums) == 1
    assert sums.pop() == pytest.approx(float(values.double().sum()))


@given(st.floats(0, 1), st.integers(0, 100))
def test_slerp_walks_the_great_circle_at_constant_speed(t, seed):
    a, b = (v / np.linalg.norm(v) for v in np.random.default_rng(seed).standard_normal((2, 6)))
    c = spheres.slerp(gram([a, b]), t)
    point = c[0] * a + c[1] * b
    assert np.linalg.norm(point) == pytest.approx(1)
    angle = math.acos(np.clip(a @ b, -1, 1))
    assert math.acos(np.clip(a @ point, -1, 1)) == pytest.approx(t * angle, abs=1e-6)


def test_slerp_of_parallel_and_zero_vectors():
    a = rng.standard_normal(4)
    np.testing.assert_allclose(spheres.slerp(gram([a, 2 * a]), 0.25), [0.75, 0.25])
    np.testing.assert_allclose(spheres.slerp(gram([a, -a]), 0.25), [0.75, 0.25])
    assert np.isfinite(spheres.slerp(gram([a, 0 * a]), 0.25)).all()


def test_barycentre_has_mean_direction_and_mean_length():
    x = rng.standard_normal((3, 7))
    w = np.array([0.2, 0.5, 0.3])
    norms = np.linalg.norm(x, axis=1)
    mean = (w / norms) @ x
    expected = mean / np.linalg.norm(mean) * (w @ norms)
    np.testing.assert_allclose(spheres.barycentre(gram(x), w, 1e-12) @ x, expected, rtol=1e-9)


def test_barycentre_of_opposites_is_linear():
    x = np.array([[1.0, 0.0], [-1.0, 0.0]])
    np.testing.assert_allclose(spheres.barycentre(gram(x), [0.5, 0.5], 1e-8), [0.5, 0.5])


def karcher_by_hand(x, w, iterations):
    norms = np.linalg.norm(x, axis=1)
    units = x / norms[:, None]
    u = w @ units / np.linalg.norm(w @ units)
    for _ in range(iterations):
        angles = np.arccos(np.clip(units @ u, -1, 1))
        step = sum(wi * a / math.sin(a) * (v - math.cos(a) * u) for wi, a, v in zip(w, angles, units, strict=True))
        size = np.linalg.norm(step)
        u = math.cos(size) * u + math.sin(size) * step / size
        u /= np.linalg.norm(u)
    return u * (w @ norms)


def test_karcher_mean_equals_the_iteration_on_the_sphere():
    x = rng.standard_normal((4, 9))
    w = np.array([0.1, 0.2, 0.3, 0.4])
    np.testing.assert_allclose(spheres.karcher(gram(x), w, 5, 1e-14) @ x, karcher_by_hand(x, w, 5), rtol=1e-9)


def test_karcher_mean_is_where_the_tangents_cancel():
    x = rng.standard_normal((3, 9))
    w = np.full(3, 1 / 3)
    u = spheres.karcher(gram(x), w, 200, 1e-14) @ x
    u /= np.linalg.norm(u)
    units = x / np.linalg.norm(x, axis=1)[:, None]
    angles = np.arccos(units @ u)
    step = sum(wi * a / math.sin(a) * (v - math.cos(a) * u) for wi, a, v in zip(w, angles, units, strict=True))
    assert np.linalg.norm(step) < 1e-10


@pytest.mark.parametrize("x", [np.zeros((2, 3)), np.array([[1.0, 0], [0, 0]]), np.array([[1.0, 0], [-1, 0]])])
def test_karcher_of_degenerate_vectors_is_finite(x):
    assert np.isfinite(spheres.karcher(gram(x), [1, 1], 10, 1e-5)).all()


def test_karcher_leaves_out_what_has_no_weight():
    x = np.array([[0.0, 3], [0, 0], [1, 0], [-1, 0]])
    with np.errstate(all="raise"):
        assert spheres.karcher(gram(x), [0, 1, 0, 0], 10, 1e-5).tolist() == [0, 0, 0, 0]
        assert spheres.karcher(gram(x), [0, 0, 1, 3], 0, 1e-5)[0] == 0


@pytest.mark.parametrize("tolerance", [0.0, 1e-5])
def test_karcher_mean_of_directions_that_cancel_is_plain(tolerance):
    """No model is preferred: the first would be taken otherwise."""
    x = np.array([[0.0, 3], [0, -1]])
    np.testing.assert_allclose(spheres.karcher(gram(x), [1, 1], 10, tolerance) @ x, [0, 1])
    np.testing.assert_allclose(spheres.karcher(gram(x[::-1]), [1, 1], 10, tolerance) @ x[::-1], [0, 1])
