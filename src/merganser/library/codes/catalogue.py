"""The codes by name, and the settings that are tried on a tensor."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import astuple, dataclass, fields
from typing import TYPE_CHECKING, Any

from merganser.errors import InputError, did_you_mean
from merganser.library.codes.coding import Code, Delta
from merganser.library.codes.levels import Levels
from merganser.library.codes.mixed_factors import LAST, MixedFactors
from merganser.library.codes.signs import Signs
from merganser.library.unfolding import is_matrix

if TYPE_CHECKING:
    from torch import Tensor

CODES: dict[str, type[Code]] = {code.name: code for code in (Signs, Levels, MixedFactors)}
#: Besides the codes: whether experts may share a part.
SHARED = "shared"
#: The names a budget may choose from.
CHOICES = (*CODES, SHARED)
_FINE = (0.03, 0.06, 0.12, 0.25)
_COARSE = (0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0)
#: Steps of factors at the end of the spectrum, and the ratio of singular values that marks the end.
_SHORTER = (0.5, 0.2, 0.08, 0.03)
_FALL = 8.0


def candidates(delta: Delta, names: Collection[str] | None = None) -> Iterator[Code]:
    """Yield the codes worth trying on a difference.

    Args:
        delta: The difference.
        names: The codes to choose from; by default all.

    Yields:
        Codes with their settings. `factors`, and scales by row or column, are only for matrices. Factors with more
        entries than the matrix are left out.
    """
    allowed = CODES if names is None else names
    matrix = is_matrix(delta.shape) and min(delta.matrix.shape) > 0
    if "levels" in allowed:
        yield from (Levels(step) for step in ((*_FINE[::2], *_COARSE) if matrix else (*_FINE, *_COARSE)))
        if matrix:
            yield from (Levels(step, "rows") for step in _COARSE[3::2])
    if "signs" in allowed:
        yield Signs("tensor")
        if matrix:
            yield from (Signs("rows"), Signs("columns"))
    if "factors" in allowed and matrix:
        d, m = delta.matrix.shape
        yield from (MixedFactors(rank) for rank in _list_ranks(min(delta.factors.rank, 1 + d * m // (d + m))))
        if end := _find_end(delta.factors.s):
            yield from (MixedFactors(end, step) for step in (LAST, *_SHORTER))


def check_codes(names: Collection[str]) -> tuple[str, ...]:
    """Return the names of codes in the order of `CHOICES`.

    Raises:
        InputError: If a name is unknown, or none of them is a code.
    """
    for name in names:
        if name not in CHOICES:
            raise InputError(
                f"unknown code {name!r}{did_you_mean(str(name), CHOICES)}; choose from {', '.join(CHOICES)}"
            )
    if not set(names) & set(CODES):
        raise InputError(f"name at least one of the codes {', '.join(CODES)}")
    return tuple(name for name in CHOICES if name in names)


def describe(code: Code) -> str:
    """Return a code with its settings as one line of text, e.g. `levels 1.4 rows`."""
    return " ".join([code.name, *(f"{value:g}" if isinstance(value, float) else str(value) for value in _values(code))])


def parse(text: str) -> Code:
    """Return the code of a description by `describe`.

    Raises:
        ValueError: If the text is not a description of a code.
    """
    name, *settings = text.split(" ")
    if name not in CODES:
        raise ValueError(f"no code {name!r}")
    kind = CODES[name]
    known = fields(kind)  # type: ignore[arg-type]
    if len(settings) != len(known):
        raise ValueError(f"{name} has {len(known)} settings")
    types: list[Any] = [type(field.default) for field in known]
    code = kind(*(convert(value) for convert, value in zip(types, settings, strict=True)))
    if describe(code) != text or any(isinstance(v, (int, float)) and not 0 < v < 1e9 for v in _values(code)):
        raise ValueError(f"{text!r} is not a description of a code")
    return code


@dataclass(frozen=True)
class TensorChoice:
    """How a tensor is stored: whole (`full`), not at all (`drop`), or in a code, of the change or of its residual.

    `residual` is the change without the part that all experts share.
    """

    code: Code | None = None
    residual: bool = False
    full: bool = False

    @classmethod
    def parse(cls, text: str) -> TensorChoice:
        """Return the choice of a text.

        Raises:
            ValueError: If the text is not a choice.
        """
        if text in ("full", "drop"):
            return cls(full=text == "full")
        rest = text.removeprefix("residual ")
        return cls(parse(rest), rest != text)

    def __str__(self) -> str:
        if self.code is None:
            return "full" if self.full else "drop"
        return f"residual {describe(self.code)}" if self.residual else describe(self.code)


def _values(code: Code) -> tuple[Any, ...]:
    return astuple(code)  # type: ignore[call-overload,no-any-return]


def _find_end(spectrum: Tensor) -> int:
    """Return the rank after which singular values drop sharply, as for a merged adapter; 0 if they never do."""
    falls = spectrum[:-1] / spectrum[1:]
    return 1 + int(falls.argmax()) if falls.numel() and float(falls.max()) > _FALL else 0


def _list_ranks(most: int) -> list[int]:
    """Return 1, 2, 3, 4, 6, 8, 11, … up to a rank."""
    found = [1] if most else []
    while found and found[-1] < most:
        found.append(min(most, max(found[-1] + 1, round(found[-1] * 2**0.5))))
    return found
