"""LAPACK and BLAS routines in float32 and float64 that run without the GIL.

scipy's own wrappers hold the GIL while they compute, and torch has no eigensolver for a part of the spectrum. The
routines are those that scipy links, called through the pointers it exports for Cython. Each call uses one thread:
decompositions run in parallel, and inner threads would only compete.
"""

from __future__ import annotations

import ctypes
import threading
from functools import cache
from types import ModuleType
from typing import Any

import torch
from scipy.linalg import cython_blas, cython_lapack
from torch import Tensor

from merganser.errors import MerganserError

#: Every argument is a pointer: to characters, numbers or arrays.
_ARGUMENTS = {"gemm": 13, "syrk": 10, "syevd": 11, "sytrd": 10, "sterf": 4, "stemr": 21, "stedc": 11, "ormtr": 13}

#: A workspace size that ormtr does not ask for; without it, it applies reflectors one by one, four times slower.
_BLOCK_REFLECTOR = 65 * 64
_SIDE = 256


def multiply(left: Tensor, right: Tensor, out: Tensor | None = None, scale: float = 1.0) -> Tensor:
    """Return `scale` · left · right, added to `out` if given, which is contiguous; one dtype, on the CPU."""
    if out is not None and not out.is_contiguous() and out.T.is_contiguous():
        return multiply(right.T, left.T, out.T, scale).T
    (rows, inner), columns = left.shape, right.shape[1]
    total = left.new_empty(rows, columns) if out is None else out
    fits = right.shape[0] == inner and total.shape == (rows, columns) and total.is_contiguous()
    if not fits or not left.dtype == right.dtype == total.dtype:
        raise ValueError(f"cannot multiply {left.dtype} {left.shape} and {right.dtype} {right.shape}")
    if inner == 0:
        return total.zero_() if out is None else total
    one, keep = _number(scale, left.dtype), _number(0.0 if out is None else 1.0, left.dtype)
    # Row-major matrices are column-major transposed ones, and a transposed product has its factors in reverse order.
    (first, by_first, first_stride), (second, by_second, second_stride) = map(_stored, (right, left))
    with _one_thread:
        _blas("gemm", left.dtype)(
            by_first, by_second, _int(columns), _int(rows), _int(inner), one, first.data_ptr(), _int(first_stride),
            second.data_ptr(), _int(second_stride), keep, total.data_ptr(), _int(max(1, columns)),
        )  # fmt: skip
    return total


def _stored(matrix: Tensor) -> tuple[Tensor, bytes, int]:
    """Return a matrix with contiguous rows or columns, whether BLAS has to transpose what it sees, and its stride."""
    (height, width), (down, across) = matrix.shape, matrix.stride()
    if across == 1 and down >= width:
        return matrix, b"N", max(1, down)
    if down == 1 and across >= height:
        return matrix, b"T", max(1, across)
    return matrix.contiguous(), b"N", max(1, width)


def add_gram(rows: Tensor, total: Tensor) -> None:
    """Add rowsᵀ · rows to the lower triangle of total; one dtype, on the CPU, with contiguous rows or columns."""
    count, columns = rows.shape
    by_rows = rows.stride(1) == 1
    # Row-major rows are column-major rowsᵀ, and the upper triangle of a column-major total the lower of a row-major.
    stride = max(rows.stride(0), columns) if by_rows else max(rows.stride(1), count)
    with _one_thread:
        one = _number(1.0, total.dtype)
        _blas("syrk", total.dtype)(
            b"U", b"N" if by_rows else b"T", _int(columns), _int(count), one, rows.data_ptr(), _int(stride),
            one, total.data_ptr(), _int(columns),
        )  # fmt: skip


def leading_eigenpairs(symmetric: Tensor, k: int, overwrite: bool = False) -> tuple[Tensor, Tensor]:
    """Return the k largest eigenvalues, descending, and their vectors as columns; reads the lower triangle.

    With `overwrite`, a contiguous matrix is destroyed and saves a copy.
    """
    n = symmetric.shape[0]
    k = min(k, n)
    symmetric = symmetric.contiguous() if overwrite else symmetric.clone(memory_format=torch.contiguous_format)
    values, vectors = _all_pairs(symmetric) if 2 * k >= n else _some_pairs(symmetric, k)
    # Column-major vectors are rows here, in ascending order.
    return values.flip(0)[:k], _reverse(vectors)[:k].T


def eigenvalues_and_leading_vectors(symmetric: Tensor, k: int, overwrite: bool = False) -> tuple[Tensor, Tensor]:
    """Return all eigenvalues, descending, and the vectors of the k largest as columns, for hardly more than the cost
    of `leading_eigenpairs`; reads the lower triangle and overwrites like it.
    """
    n = symmetric.shape[0]
    k = min(k, n)
    symmetric = symmetric.contiguous() if overwrite else symmetric.clone(memory_format=torch.contiguous_format)
    whole = symmetric.new_empty(n)
    if 2 * k >= n:
        whole, vectors = _all_pairs(symmetric)
    else:
        _, vectors = _some_pairs(symmetric, k, whole)
    return whole.flip(0), _reverse(vectors)[:k].T


def _reverse(rows: Tensor) -> Tensor:
    """Reverse the order of rows in place, and return them."""
    n = rows.shape[0]
    for start in range(0, n // 2, _SIDE):
        stop = min(start + _SIDE, n // 2)
        first = rows[start:stop].flip(0)
        rows[start:stop] = rows[n - stop : n - start].flip(0)
        rows[n - stop : n - start] = first
    return rows


def _all_pairs(symmetric: Tensor) -> tuple[Tensor, Tensor]:
    """Compute by divide and conquer, with the vectors in place of the matrix."""
    n = symmetric.shape[0]
    values = symmetric.new_empty(n)
    _call_with_workspace("syevd", values.dtype, b"V", b"U", _int(n), symmetric.data_ptr(), _int(n), values.data_ptr())
    return values, symmetric


def _some_pairs(symmetric: Tensor, k: int, whole: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Reduce to a tridiagonal matrix in place, compute k of its pairs by relatively robust representations, and
    transform back. All eigenvalues, which the tridiagonal matrix gives cheaply, are written to `whole`.

    syevr takes the same steps, but uses bisection and inverse iteration for a part of the spectrum, which is slower.
    """
    n = symmetric.shape[0]
    diagonal, beside, scales, values = (symmetric.new_empty(n) for _ in range(4))
    vectors = symmetric.new_empty(k, n)
    dtype, zero = symmetric.dtype, _number(0.0, symmetric.dtype)
    support = torch.empty(2 * k, dtype=torch.int32, device="cpu")
    triangle = (b"U", _int(n), symmetric.data_ptr(), _int(n))
    _call_with_workspace("sytrd", dtype, *triangle, diagonal.data_ptr(), beside.data_ptr(), scales.data_ptr())
    tridiagonal = diagonal.clone(), beside.clone()
    if whole is not None:
        _all_values(whole.copy_(diagonal), beside.clone())
    try:
        _call_with_workspace(
            "stemr", dtype, b"V", b"I", _int(n), diagonal.data_ptr(), beside.data_ptr(), zero, zero, _int(n - k + 1),
            _int(n), _int(0), values.data_ptr(), vectors.data_ptr(), _int(n), _int(k), support.data_ptr(), _int(1),
        )  # fmt: skip
    except MerganserError:  # it may not tell apart the null vectors of a matrix of low rank
        values, vectors = _leading_of_tridiagonal(*tridiagonal, k)
    _call_with_workspace(
        "ormtr", dtype, b"L", b"U", b"N", _int(n), _int(k), symmetric.data_ptr(), _int(n), scales.data_ptr(),
        vectors.data_ptr(), _int(n),
    )  # fmt: skip
    return values[:k], vectors


def _leading_of_tridiagonal(diagonal: Tensor, beside: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest pairs of a tridiagonal matrix, ascending, by divide and conquer; overwrites both."""
    n = diagonal.numel()
    vectors = diagonal.new_empty(n, n)
    pointers = (diagonal.data_ptr(), beside.data_ptr(), vectors.data_ptr())
    _call_with_workspace("stedc", diagonal.dtype, b"I", _int(n), *pointers, _int(n))
    return diagonal[n - k :], vectors[n - k :]


def _all_values(diagonal: Tensor, beside: Tensor) -> None:
    """Compute the eigenvalues of a tridiagonal matrix, ascending, in place of its diagonal."""
    info = ctypes.c_int()
    _lapack("sterf", diagonal.dtype)(_int(diagonal.numel()), diagonal.data_ptr(), beside.data_ptr(), ctypes.byref(info))
    _check("sterf", info)


def _check(name: str, info: ctypes.c_int) -> None:
    if info.value:
        raise MerganserError(f"the eigenvalues of a Gram matrix did not converge (LAPACK's {name} says {info.value})")


def _call_with_workspace(name: str, dtype: torch.dtype, *arguments: Any) -> None:
    """Query a routine for the sizes of its workspaces, then call it with these."""
    info = ctypes.c_int()
    integers = name in ("syevd", "stemr", "stedc")

    def call(work: Tensor, lwork: int, iwork: Tensor, liwork: int) -> None:
        room = [work.data_ptr(), _int(lwork)] + ([iwork.data_ptr(), _int(liwork)] if integers else [])
        _lapack(name, dtype)(*arguments, *room, ctypes.byref(info))

    work, iwork = torch.empty(1, dtype=dtype, device="cpu"), torch.empty(1, dtype=torch.int32, device="cpu")
    call(work, -1, iwork, -1)
    # A size beyond 2²⁴ may be rounded down in float32.
    work = torch.empty(int(float(work) * (1 + 1e-6)) + _BLOCK_REFLECTOR, dtype=dtype, device="cpu")
    iwork = torch.empty(int(iwork) if integers else 0, dtype=torch.int32, device="cpu")
    with _one_thread:
        call(work, work.numel(), iwork, iwork.numel())
    _check(name, info)


def _int(value: int) -> Any:
    return ctypes.byref(ctypes.c_int(value))


def _number(value: float, dtype: torch.dtype) -> Any:
    return ctypes.byref((ctypes.c_float if dtype == torch.float32 else ctypes.c_double)(value))


@cache
def _lapack(name: str, dtype: torch.dtype) -> Any:
    return _load(cython_lapack, name, dtype)


@cache
def _blas(name: str, dtype: torch.dtype) -> Any:
    return _load(cython_blas, name, dtype)


def _load(module: ModuleType, name: str, dtype: torch.dtype) -> Any:
    capsule = module.__pyx_capi__[("s" if dtype == torch.float32 else "d") + name]
    name_of, pointer_of = ctypes.pythonapi.PyCapsule_GetName, ctypes.pythonapi.PyCapsule_GetPointer
    name_of.restype, name_of.argtypes = ctypes.c_char_p, [ctypes.py_object]
    pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    prototype = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * _ARGUMENTS[name])
    return prototype(pointer_of(capsule, name_of(capsule)))


class _OneThread:
    """Limits scipy's BLAS to one thread while any caller is inside; the last to leave restores the old number.

    Does nothing if scipy is linked against another BLAS than that of its wheels.
    """

    def __init__(self) -> None:
        library = ctypes.CDLL(cython_lapack.__file__)
        self._set: Any = getattr(library, "scipy_openblas_set_num_threads", None)
        self._get: Any = getattr(library, "scipy_openblas_get_num_threads", None)
        self._lock = threading.Lock()
        self._inside = 0
        self._before = 1

    def __enter__(self) -> None:
        if self._set is None:
            return
        with self._lock:
            if self._inside == 0:
                self._before = self._get()
                self._set(1)
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        if self._set is None:
            return
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                self._set(self._before)


_one_thread = _OneThread()
