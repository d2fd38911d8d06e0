import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from merganser.errors import MerganserError
from merganser.kernels import lapack
from merganser.kernels.lapack import _one_thread, add_gram, leading_eigenpairs, multiply
from merganser.kernels.spectra import product


def positive(n, seed=0):
    a = np.random.default_rng(seed).standard_normal((n + 3, n))
    return a.T @ a


@pytest.mark.parametrize("n", [1, 2, 7, 40])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_leading_eigenpairs(n, share):
    k = max(1, int(share * n))
    matrix = positive(n)
    lower = torch.from_numpy(np.tril(matrix))
    before = lower.clone()
    values, vectors = leading_eigenpairs(lower, k)
    wanted = np.linalg.eigvalsh(matrix)[::-1][:k]
    np.testing.assert_allclose(values, wanted, rtol=1e-10)
    np.testing.assert_allclose(matrix @ vectors.numpy(), vectors.numpy() * wanted, atol=1e-9 * wanted[0])
    np.testing.assert_allclose(vectors.T @ vectors, np.eye(k), atol=1e-10)
    assert torch.equal(lower, before)


def stored(matrix, form):
    """The same matrix with contiguous rows, contiguous columns, as a part of a larger one, or with neither."""
    if form == "columns":
        return matrix.T.contiguous().T
    if form in ("part", "part of columns"):
        rows, columns = matrix.shape
        whole = matrix.new_full((rows + 2, columns + 3), torch.nan)
        whole = whole if form == "part" else whole.T.contiguous().T
        whole[1 : rows + 1, 2 : columns + 2] = matrix
        return whole[1 : rows + 1, 2 : columns + 2]
    if form == "strided":
        return matrix.repeat_interleave(2, dim=0).repeat_interleave(2, dim=1)[::2, ::2]
    return matrix.clone(memory_format=torch.contiguous_format)


FORMS = st.sampled_from(["rows", "columns", "part", "part of columns", "strided"])


@given(
    shape=st.tuples(*[st.integers(0, 40)] * 3),
    forms=st.tuples(FORMS, FORMS, st.sampled_from([None, "rows", "columns"])),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    scale=st.sampled_from([1.0, -1.0, 0.5]),
    seed=st.integers(0, 100),
)
@settings(max_examples=60, deadline=None)
def test_products_are_those_of_numpy(shape, forms, dtype, scale, seed):
    (rows, inner, columns), rng = shape, np.random.default_rng(seed)
    left, right, start = (rng.standard_normal(s) for s in ((rows, inner), (inner, columns), (rows, columns)))
    tensors = [stored(torch.from_numpy(x).to(dtype), form) for x, form in zip((left, right), forms, strict=False)]
    out = forms[2] and stored(torch.from_numpy(start).to(dtype), forms[2])
    found = multiply(*tensors, out, scale)
    assert found.dtype == dtype
    tolerance = 1e-4 if dtype == torch.float32 else 1e-12
    np.testing.assert_allclose(found, scale * left @ right + (0 if out is None else start), atol=tolerance)
    assert out is None or found.data_ptr() == out.data_ptr()


@pytest.mark.parametrize(
    ("right", "out"),
    [(torch.ones(3, 2), None), (torch.ones(2, 2).double(), None), (torch.ones(2, 2), torch.ones(2, 3))],
)
def test_products_of_matrices_that_do_not_fit_are_refused(right, out):
    with pytest.raises(ValueError, match="cannot multiply"):
        multiply(torch.ones(2, 2), right, out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("threads", [1, 2])
def test_products_do_not_depend_on_who_computes_them(dtype, threads):
    left, right = torch.randn(30, 20, dtype=dtype), torch.randn(20, 40, dtype=dtype)
    wanted = left.double() @ right.double()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        torch.testing.assert_close(product(left, right).double(), wanted, atol=1e-4, rtol=0)
        torch.testing.assert_close(product(left, right, -wanted.to(dtype), 2.0).double(), wanted, atol=1e-4, rtol=0)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("k", [3, 40])
def test_a_matrix_that_may_be_overwritten_gives_the_same_bits(k):
    lower = torch.from_numpy(np.tril(positive(40)))
    kept = leading_eigenpairs(lower, k)
    overwritten = leading_eigenpairs(lower, k, overwrite=True)
    assert all(torch.equal(*pair) for pair in zip(kept, overwritten, strict=True))


def test_divide_and_conquer_takes_over_where_robust_representations_fail(monkeypatch):
    call = lapack._call_with_workspace

    def failing(name, *arguments):
        if name == "stemr":
            raise MerganserError("no")
        call(name, *arguments)

    matrix = positive(40)
    monkeypatch.setattr(lapack, "_call_with_workspace", failing)
    values, vectors = leading_eigenpairs(torch.from_numpy(np.tril(matrix)), 5)
    wanted = np.linalg.eigvalsh(matrix)[::-1][:5]
    np.testing.assert_allclose(values, wanted, rtol=1e-10)
    np.testing.assert_allclose(matrix @ vectors.numpy(), vectors.numpy() * wanted, atol=1e-9 * wanted[0])


@given(st.integers(0, 1000), st.integers(3, 60), st.data())
@settings(max_examples=40, deadline=None)
def test_repeated_and_vanishing_eigenvalues(seed, n, data):
    """Clusters leave the vectors free within their span: the pairs must still solve the problem and be orthonormal."""
    spectrum = data.draw(st.lists(st.sampled_from([1.0, 1.0 + 1e-13, 0.5, 1e-9, 0.0]), min_size=n, max_size=n))
    k = data.draw(st.integers(1, n))
    basis = np.linalg.qr(np.random.default_rng(seed).standard_normal((n, n)))[0]
    matrix = (basis * spectrum) @ basis.T
    values, vectors = leading_eigenpairs(torch.from_numpy(np.tril(matrix)), k)
    np.testing.assert_allclose(values, sorted(spectrum, reverse=True)[:k], atol=1e-12)
    np.testing.assert_allclose(matrix @ vectors.numpy(), vectors.numpy() * values.numpy(), atol=1e-12)
    np.testing.assert_allclose(vectors.T @ vectors, np.eye(k), atol=1e-10)


@pytest.mark.parametrize("shape", [(9, 5), (5, 9), (1, 4), (4, 1)])
@pytest.mark.parametrize("layout", ["rows", "columns", "some rows", "some columns"])
def test_gram_is_added_to_the_lower_triangle(shape, layout):
    count, n = shape
    rows = {
        "rows": torch.randn(count, n, dtype=torch.float64),
        "columns": torch.randn(n, count, dtype=torch.float64).T,
        "some rows": torch.randn(n, count + 4, dtype=torch.float64).T[2 : count + 2],
        "some columns": torch.randn(count, n + 3, dtype=torch.float64)[:, 1 : n + 1],
    }[layout]
    total = torch.ones(n, n, dtype=torch.float64)
    add_gram(rows, total)
    np.testing.assert_allclose(np.tril(total), np.tril(1 + rows.numpy().T @ rows.numpy()), rtol=1e-12)
    np.testing.assert_array_equal(np.triu(total, 1), np.triu(np.ones((n, n)), 1))


def test_threads_do_not_disturb_each_other():
    matrices = [torch.from_numpy(positive(60, seed)) for seed in range(4)]
    alone = [leading_eigenpairs(matrix, 5)[0] for matrix in matrices]
    found = [None] * 4

    def work(index):
        found[index] = leading_eigenpairs(matrices[index], 5)[0]

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(a, b) for a, b in zip(alone, found, strict=True))


def test_threads_of_the_blas_are_restored():
    inside = _one_thread._get
    if inside is None:
        pytest.skip("scipy is linked against another BLAS")
    before = inside()
    with _one_thread, _one_thread:
        assert inside() == 1
    assert inside() == before


def test_failure_is_an_error(monkeypatch):
    real = lapack._lapack

    def failing(*arguments):
        real("syevd", torch.float64)(*arguments)
        arguments[-1]._obj.value = 3

    monkeypatch.setattr("merganser.kernels.lapack._lapack", lambda name, dtype: failing)
    with pytest.raises(MerganserError, match="did not converge"):
        leading_eigenpairs(torch.eye(4, dtype=torch.float64), 4)
