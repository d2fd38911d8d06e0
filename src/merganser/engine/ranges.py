"""Values that are not finite, or too large for a rule or a dtype: refused, since a merge would spread them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from merganser.checkpoints.dtypes import Element
from merganser.errors import InputError
from merganser.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

#: Dtypes that ordinary weights may overflow.
NARROW = ("float16", "float8_e4m3fn", "float8_e5m2")
#: The largest float64 entries that rules may square, add up and multiply.
_SQUARABLE = 1e70


def check_input(tensor: Tensor, label: str, name: str, method: str | None) -> None:
    """Refuse a source tensor with values that a merge would spread.

    Args:
        tensor: The values, as a rule gets them.
        label: The model.
        name: The name of its tensor.
        method: The method, if it squares values; None if it does not.

    Raises:
        InputError: If a value is not finite, or too large for the method.
    """
    # A sum is the cheapest test; only a suspicious one is examined further.
    if not math.isfinite(tensor.sum().item()) and not tensor.isfinite().all():
        what = "NaN" if tensor.isnan().any() else "infinite values"
        raise InputError(
            f"{label}: tensor {name!r} contains {what}, which a merge would spread; use a sound checkpoint, or allow "
            "it (allow_nan=True)"
        )
    if method is None or tensor.dtype != torch.float64 or not tensor.numel():
        return
    if (largest := float(tensor.abs().amax())) > _SQUARABLE:
        raise InputError(
            f"{label}: tensor {name!r} has values up to {largest:.3g}, too large for {method!r}, which squares them; "
            "use a sound checkpoint"
        )


def check_result(tensor: Tensor, narrow: Tensor, name: str, method: str | None) -> None:
    """Refuse a result that overflowed, or values that do not fit the output's dtype.

    Args:
        tensor: The result.
        narrow: The result in the output's dtype.
        name: The name of the output.
        method: The method that computed it; None if it was copied.

    Raises:
        InputError: If a computed value is not finite, or does not fit.
    """
    # Float8 has no sums, and some float8 types clip instead of overflowing.
    if narrow.dtype.itemsize > 1 and math.isfinite(narrow.sum().item()):
        return
    if method is not None and not tensor.isfinite().all():
        raise InputError(
            f"{name!r}: the weights are too large for {method!r}, whose computation in {Element.of(tensor.dtype)} "
            "overflows; use a sound checkpoint, or allow it (allow_nan=True)"
        )
    if torch.finfo(tensor.dtype).max <= torch.finfo(narrow.dtype).max:
        return
    kind = Element.of(narrow.dtype)
    if lost := int((tensor.isfinite() & (tensor.abs() >= _limit(narrow.dtype))).sum()):
        raise InputError(
            f"{name!r}: {lost} values do not fit {kind}; choose an output dtype with a larger range, "
            f"such as {Element.of(tensor.dtype)}"
        )


def _limit(dtype: torch.dtype) -> float:
    """Return the smallest number that does not round to a finite one: half an ulp beyond the largest."""
    info = torch.finfo(dtype)
    return info.max + math.ldexp(info.eps, math.frexp(info.max)[1] - 2)
