"""The codes by name, and which of their settings are tried on a tensor."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any

from merganser.errors import InputError, did_you_mean
from merganser.library.codes.coding import Code, flat
from merganser.library.codes.levels import Levels
from merganser.library.codes.mixed_factors import MixedFactors
from merganser.library.codes.signs import Signs
from merganser.library.unfolding import is_matrix

CODES: dict[str, type[Code]] = {code.name: code for code in (Signs, Levels, MixedFactors)}
#: Besides the codes: whether experts may share a part.
SHARED = "shared"
#: What a budget chooses from.
CHOICES = (*CODES, SHARED)
_FINE = (0.03, 0.06, 0.12, 0.25)
_COARSE = (0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0)


def candidates(shape: Sequence[int], names: Collection[str] | None = None) -> Iterator[Code]:
    """Yield the codes worth trying on a tensor of a shape.

    Args:
        shape: The tensor's own shape.
        names: The codes to choose from; all by default.

    Yields:
        Codes with their settings; `factors`, and scales by row or column, only for matrices.
    """
    allowed = CODES if names is None else names
    matrix = is_matrix(shape)
    if "levels" in allowed:
        yield from (Levels(step) for step in (*_FINE, *_COARSE))
        if matrix:
            yield from (Levels(step, "rows") for step in _COARSE[1::2])
    if "signs" in allowed:
        yield Signs("tensor")
        if matrix:
            yield from (Signs("rows"), Signs("columns"))
    if "factors" in allowed and matrix:
        yield from (MixedFactors(rank) for rank in _ranks(min(flat(shape))))


def check_codes(names: Collection[str]) -> tuple[str, ...]:
    """Return the names of codes in the order of `CHOICES`.

    Raises:
        InputError: A name is not known, or no code is among them.
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
    """Return the code that `describe` describes so.

    Raises:
        ValueError: The text is none of its descriptions.
    """
    name, *settings = text.split(" ")
    if name not in CODES:
        raise ValueError(f"no code {name!r}")
    kind = CODES[name]
    known = fields(kind)  # type: ignore[arg-type]
    if len(settings) != len(known):
        raise ValueError(f"{name} has {len(known)} settings")
    code = kind(*(type(field.default)(value) for field, value in zip(known, settings, strict=True)))
    if describe(code) != text or any(isinstance(v, (int, float)) and not 0 < v < 1e9 for v in _values(code)):
        raise ValueError(f"{text!r} is not how a code is written")
    return code


@dataclass(frozen=True)
class TensorChoice:
    """What is done with a tensor: whole (`full`), not at all (`drop`), or in a code, of the change or of its residual.

    `residual` is what is left of the change after the part that all experts share.
    """

    code: Code | None = None
    residual: bool = False
    full: bool = False

    @classmethod
    def parse(cls, text: str) -> TensorChoice:
        """Return the choice that is written so.

        Raises:
            ValueError: No choice is.
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


def _ranks(most: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, … up to the full rank."""
    found = [1]
    while found[-1] < most:
        found.append(min(most, max(found[-1] + 1, round(found[-1] * 2**0.5))))
    return found
