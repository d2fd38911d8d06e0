"""Three LAPACK and BLAS routines, called so that other threads go on meanwhile.

scipy's own wrappers hold the interpreter's lock while they compute, and torch has no eigensolver for a part of the
spectrum. The routines are those scipy links, reached through the pointers it exports for Cython. Each call keeps to
one thread: decompositions are run beside each other, and threads within them would only be in the way.
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
_ARGUMENTS = {"dsyrk": 10, "dsyevd": 11, "dsyevr": 21}


def add_gram(rows: Tensor, total: Tensor) -> None:
    """total += rowsᵀ · rows in the lower triangle; both contiguous float64 on the CPU."""
    count, columns = rows.shape
    # Row-major rows are column-major rowsᵀ, and the upper triangle of a column-major total the lower of a row-major.
    with _one_thread:
        _blas("dsyrk")(
            b"U", b"N", _int(columns), _int(count), _double(1.0), rows.data_ptr(), _int(columns), _double(1.0),
            total.data_ptr(), _int(columns),
        )  # fmt: skip


def leading_eigenpairs(symmetric: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest eigenvalues, descending, and their vectors as columns; reads the lower triangle."""
    n = symmetric.shape[0]
    matrix = symmetric.contiguous().clone()
    info, found = ctypes.c_int(), ctypes.c_int()
    values = torch.empty(n, dtype=torch.float64)
    if 2 * k >= n:
        # Divide and conquer, vectors in place of the matrix.
        def all_pairs(work: int, lwork: int, iwork: int, liwork: int) -> None:
            _lapack("dsyevd")(
                b"V", b"U", _int(n), matrix.data_ptr(), _int(n), values.data_ptr(), work, _int(lwork), iwork,
                _int(liwork), ctypes.byref(info),
            )  # fmt: skip

        _with_workspace(all_pairs)
        vectors = matrix
    else:
        vectors = torch.empty(k, n, dtype=torch.float64)
        support = torch.empty(2 * k, dtype=torch.int32)

        def some_pairs(work: int, lwork: int, iwork: int, liwork: int) -> None:
            _lapack("dsyevr")(
                b"V", b"I", b"U", _int(n), matrix.data_ptr(), _int(n), _double(0.0), _double(0.0), _int(n - k + 1),
                _int(n), _double(0.0), ctypes.byref(found), values.data_ptr(), vectors.data_ptr(), _int(n),
                support.data_ptr(), work, _int(lwork), iwork, _int(liwork), ctypes.byref(info),
            )  # fmt: skip

        _with_workspace(some_pairs)
    if info.value:
        raise MerganserError(f"the eigenvalues of a {n}×{n} Gram matrix did not converge (LAPACK says {info.value})")
    # Column-major vectors are rows here, in ascending order.
    last = min(k, vectors.shape[0])
    return values[: vectors.shape[0]].flip(0)[:last], vectors.flip(0)[:last].T


def _with_workspace(call: Any) -> None:
    """Ask for the sizes, then call with room."""
    size, integers = torch.empty(1, dtype=torch.float64), torch.empty(1, dtype=torch.int32)
    call(size.data_ptr(), -1, integers.data_ptr(), -1)
    work = torch.empty(int(size), dtype=torch.float64)
    iwork = torch.empty(int(integers), dtype=torch.int32)
    with _one_thread:
        call(work.data_ptr(), work.numel(), iwork.data_ptr(), iwork.numel())


def _int(value: int) -> Any:
    return ctypes.byref(ctypes.c_int(value))


def _double(value: float) -> Any:
    return ctypes.byref(ctypes.c_double(value))


@cache
def _lapack(name: str) -> Any:
    return _load(cython_lapack, name)


@cache
def _blas(name: str) -> Any:
    return _load(cython_blas, name)


def _load(module: ModuleType, name: str) -> Any:
    capsule = module.__pyx_capi__[name]
    name_of, pointer_of = ctypes.pythonapi.PyCapsule_GetName, ctypes.pythonapi.PyCapsule_GetPointer
    name_of.restype, name_of.argtypes = ctypes.c_char_p, [ctypes.py_object]
    pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    prototype = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * _ARGUMENTS[name])
    return prototype(pointer_of(capsule, name_of(capsule)))


class _OneThread:
    """While anyone is inside, scipy's BLAS has one thread; whoever leaves last restores what was before.

    Does nothing where scipy is linked against another BLAS than the one of its wheels.
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
