import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from merganser.kernels.drops import drop_, drop_by_rank, order

CELLS = st.sampled_from([0.0, -0.0, 0.5, -0.5, 1e-42, 3e38, float("inf"), float("nan")]) | st.floats(-10, 10, width=16)


def draws(shape, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).integers(-(2**15), 2**15, shape, dtype=np.int16))


def tables(columns, seed=0):
    """Bounds and gains by rank, with certain survivors and certain losses among them."""
    generator = np.random.default_rng(seed)
    bounds = generator.integers(-(2**15), 2**15 + 1, columns, dtype=np.int32)
    bounds[generator.random(columns) < 0.1] = 2**15
    bounds[generator.random(columns) < 0.1] = -(2**15)
    return torch.from_numpy(bounds), torch.from_numpy(generator.random(columns, dtype=np.float32) + 1)


def naive(rows, bits, bounds, gains):
    """Row by row, entry by entry; magnitudes cut to the bits of bfloat16."""
    rows, bits, bounds, gains = (t.numpy() for t in (rows, bits, bounds, gains))
    result = np.zeros_like(rows)
    for r, row in enumerate(rows):
        magnitudes = np.abs(row.astype(np.float32)).view(np.uint32) >> 16
        for rank, column in enumerate(np.argsort(magnitudes, kind="stable")):
            result[r, column] = row[column] * (gains[rank] if bits[r, rank] < bounds[rank] else 0)
    return result


def matrices(data, rows, columns):
    flat = data.draw(st.lists(CELLS, min_size=rows * columns, max_size=rows * columns))
    return torch.tensor(flat, dtype=torch.float32).view(rows, columns)


@settings(max_examples=50)
@given(st.integers(0, 4), st.integers(1, 30), st.data())
def test_order_is_a_stable_argsort(rows, columns, data):
    scores = matrices(data, rows, columns)
    magnitudes = scores.numpy().view(np.uint32) & 0x7FFF0000
    np.testing.assert_array_equal(order(scores).numpy(), np.argsort(magnitudes, axis=1, kind="stable"))


@pytest.mark.parametrize("columns", [2048, 2**16, 2**16 + 1])
def test_order_resolves_what_bfloat16_does(columns):
    scores = torch.from_numpy(np.random.default_rng(0).lognormal(size=(3, columns)).astype(np.float32))
    found = order(scores)
    np.testing.assert_array_equal(found.sort(dim=1).values, torch.arange(columns).expand(3, -1))
    ordered = scores.gather(1, found)
    assert (ordered[:, 1:] >= ordered[:, :-1] * (1 - 2**-7)).all()
    assert (ordered[:, 1:] < ordered[:, :-1] * (1 - 2**-9)).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_drop_zeroes_what_is_not_below_the_bound(dtype):
    values, bits = torch.randn(1000, dtype=dtype), draws(1000)
    expected = torch.where(bits < 100, values, 0.0)
    np.testing.assert_array_equal(drop_(values.clone(), bits, 100), expected)


@settings(max_examples=50)
@given(st.integers(1, 5), st.integers(1, 30), st.data(), st.integers(0, 99))
def test_drops_by_rank_are_those_of_a_naive_loop(rows, columns, data, seed):
    numbers = matrices(data, rows, columns)
    bits, (bounds, gains) = draws((rows, columns), seed), tables(columns, seed)
    with np.errstate(invalid="ignore", over="ignore"):
        expected = naive(numbers, bits, bounds, gains)
    np.testing.assert_array_equal(drop_by_rank(numbers, bits, bounds.numpy(), gains.numpy()), expected)


def test_float64_is_ranked_too():
    rows, bits, (bounds, gains) = torch.randn(3, 40, dtype=torch.float64), draws((3, 40)), tables(40)
    found = drop_by_rank(rows, bits, bounds.numpy(), gains.double().numpy())
    assert found.dtype == torch.float64
    np.testing.assert_array_equal(found, naive(rows, bits, bounds, gains.double()))
