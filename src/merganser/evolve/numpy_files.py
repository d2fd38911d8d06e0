"""Read numpy files (.npy, .npz) without trusting them: no pickles, and no sizes beyond the file's."""

from __future__ import annotations

import io
import math
import zipfile
import zlib
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from merganser.errors import InputError, reading

#: Maximum bytes of the unpacked arrays of one file.
LARGEST = 2**32


def read_arrays(path: str | PathLike[str]) -> Mapping[str, NDArray[Any]]:
    """Read the arrays of an .npz file by name, or the one of an .npy file under the name "".

    Args:
        path: The file.

    Returns:
        Arrays of numbers or truth values.

    Raises:
        InputError: If the file cannot be read, is damaged, contains anything but plain numbers, or unpacks to too much.

    Example:
        >>> read_arrays("answers.npz")["answers"].shape  # doctest: +SKIP
    """
    source = Path(path)
    if not source.is_file():
        raise InputError(f"{source}: no such file")
    with reading(source):
        content = source.read_bytes()
    if content.startswith(b"\x93NUMPY"):
        return {"": _parse(content, str(source))}
    if not content.startswith(b"PK"):
        hint = " (pickles can run code and are not read)" if content.startswith(b"\x80") else ""
        raise InputError(f"{source}: not a numpy file (.npy or .npz){hint}")
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            members = archive.infolist()
            if (size := sum(member.file_size for member in members)) > LARGEST:
                raise InputError(f"{source}: unpacks to {size} bytes, more than the limit of {LARGEST}")
            names = [member.filename.removesuffix(".npy") for member in members]
            if len(set(names)) < len(names):
                raise InputError(f"{source}: contains two arrays of one name")
            return {
                name: _parse(archive.read(member), f"{source}: {name!r}")
                for name, member in zip(names, members, strict=True)
            }
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, OSError, ValueError, zlib.error) as error:
        raise InputError(f"{source}: a damaged .npz file: {error}") from None


def _parse(content: bytes, where: str) -> NDArray[Any]:
    """Parse one array, and check its header against its bytes."""
    stream = io.BytesIO(content)
    try:
        version = np.lib.format.read_magic(stream)
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
        shape, fortran, dtype = read(stream)
    except Exception as error:  # a header is a Python literal, so numpy's reader can raise anything
        raise InputError(f"{where}: not a numpy array: {error}") from None
    if dtype.kind not in "bfiu":
        raise InputError(f"{where}: expected an array of numbers, got {dtype}")
    body = content[stream.tell() :]
    if any(length < 0 for length in shape) or math.prod(shape) * dtype.itemsize != len(body):
        raise InputError(f"{where}: the header describes an array of shape {shape}, but there are {len(body)} bytes")
    return np.frombuffer(body, dtype).reshape(shape, order="F" if fortran else "C")
