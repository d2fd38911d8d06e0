"""K-quants of GGUF, written by the ggml library in the Python packages of llama.cpp (extra `llama-cpp`)."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from merganser.errors import MissingExtraError, require
from merganser.lazy import np, torch

if TYPE_CHECKING:
    from torch import Tensor

_FUNCTION = "ggml_quantize_chunk"
_INSTEAD = "write q8_0 and convert it with llama.cpp's `llama-quantize` (the guide on formats has the command)"


def quantize_rows(values: Tensor, kind: int) -> Tensor:
    """Quantise the rows of a matrix as llama.cpp does without an importance matrix.

    Args:
        values: Finite float32 values, shape (rows, width); the width is a multiple of the type's block.
        kind: The number of the GGUF type.

    Returns:
        The codes in uint8, one row for each row.

    Raises:
        MissingExtraError: If no package with ggml is installed.
    """
    block, size = require("gguf", "hf").GGML_QUANT_SIZES[kind]
    rows, width = values.shape
    given = np.ascontiguousarray(values.numpy(), np.float32)
    codes = np.empty((rows, width // block * size), np.uint8)
    written = load_ggml()(kind, given.ctypes.data, codes.ctypes.data, 0, rows, width, None)
    assert written == codes.nbytes, (written, codes.nbytes)
    return torch.from_numpy(codes)


@functools.cache
def load_ggml() -> Any:
    """Return ggml's function that quantises rows, from llama-cpp-python if it is installed, else from xllamacpp.

    Raises:
        MissingExtraError: If neither package is installed.
    """
    for path in _libraries():
        try:
            function = getattr(ctypes.CDLL(str(path)), _FUNCTION)
        except (OSError, AttributeError):
            continue
        sizes, pointer = [ctypes.c_int64] * 3, ctypes.c_void_p
        function.argtypes = [ctypes.c_int, pointer, pointer, *sizes, pointer]
        function.restype = ctypes.c_size_t
        return function
    raise MissingExtraError(f"the installed xllamacpp does not offer {_FUNCTION}; {_INSTEAD}")


def _libraries() -> Iterator[Path]:
    found = importlib.util.find_spec("llama_cpp")
    if found is not None and found.origin is not None:
        yield from sorted(Path(found.origin).parent.glob("lib/*ggml-base*"))
    try:
        package = require("xllamacpp", "llama-cpp")
    except MissingExtraError as error:
        raise MissingExtraError(f"output.quantize: {error}, or {_INSTEAD}") from None
    yield from sorted(Path(str(package.__file__)).parent.glob("xllamacpp*"))
