"""Dtypes by name, known without loading torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from merganser.errors import CheckpointError, InputError, did_you_mean
from merganser.lazy import torch

#: Dtypes that weights can be written in.
FLOATS = ("bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2")
ALIASES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}


@dataclass(frozen=True)
class Element:
    """A dtype by its name in torch, with the properties that are needed before tensors are read.

    Attributes:
        name: The name of the dtype, such as "bfloat16".
        itemsize: Bytes of one element.
        is_floating_point: Whether elements are real numbers.
        is_complex: Whether elements are complex numbers.

    Example:
        >>> Element.of("bf16").itemsize
        2
    """

    name: str
    itemsize: int
    is_floating_point: bool = False
    is_complex: bool = False

    @classmethod
    def of(cls, dtype: Element | torch.dtype | str) -> Element:
        """Return the element of a dtype, given as one of torch's or by its name."""
        if isinstance(dtype, Element):
            return dtype
        name = _full_name(dtype)
        if name not in _KNOWN:
            found = getattr(torch, name, None)
            if not isinstance(found, torch.dtype):
                raise CheckpointError(f"{name!r} is not a dtype that this torch ({torch.__version__}) has")
            _KNOWN[name] = cls(name, found.itemsize, found.is_floating_point, found.is_complex)
        return _KNOWN[name]

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of torch."""
        if not hasattr(torch, self.name):
            raise CheckpointError(f"this torch ({torch.__version__}) has no dtype {self.name!r}; install a newer torch")
        found: torch.dtype = getattr(torch, self.name)
        return found

    def __str__(self) -> str:
        return self.name


def _full_name(dtype: torch.dtype | str) -> str:
    name = str(dtype).removeprefix("torch.")
    return ALIASES.get(name, name)


#: Dtypes of safetensors files; torch knows the others.
_KNOWN = {
    element.name: element
    for element in (
        *(Element(f"float{bits}", bits // 8, True) for bits in (16, 32, 64)),
        *(Element(f"{sign}int{bits}", bits // 8) for sign in ("", "u") for bits in (8, 16, 32, 64)),
        *(Element(name, 1, True) for name in ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu")),
        Element("bfloat16", 2, True),
        Element("bool", 1),
        Element("complex64", 8, is_complex=True),
    )
}


def dtype_of(given: str | torch.dtype, known: Iterable[str] = FLOATS, what: str = "weights") -> torch.dtype:
    """Return a dtype given by name or as such, if it is among those `known` for `what`."""
    found: torch.dtype = getattr(torch, dtype_name(given, known, what))
    return found


def dtype_name(given: str | torch.dtype, known: Iterable[str] = FLOATS, what: str = "weights") -> str:
    """Return the name of a dtype given by name or as such, if it is among those `known` for `what`."""
    if not isinstance(given, str) and not isinstance(given, torch.dtype):
        raise InputError(f"dtype: expected a name such as 'bfloat16' or a torch.dtype, got {given!r}")
    name = _full_name(given)
    if name not in known:
        raise InputError(f"{name!r} is not a dtype of {what}{did_you_mean(name, known)}")
    return name
