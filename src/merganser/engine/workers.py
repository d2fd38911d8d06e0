"""The workers of a merge: their memory, and the device they compute on."""

from __future__ import annotations

from merganser.errors import InputError, first_line
from merganser.lazy import torch

#: The memory limit of a merge, unless another is given.
DEFAULT_MEMORY = 2 << 30


def check_workers(workers: int | None, device: str) -> None:
    """Refuse a number of workers or a device that cannot compute.

    Raises:
        InputError: If the number is not a whole number of at least 1, or the device is not usable on this machine.
    """
    if workers is not None and (not isinstance(workers, int) or workers < 1):
        raise InputError(f"workers: expected a whole number of at least 1, got {workers!r}")
    if device == "cpu":
        return
    try:
        torch.zeros(1, device=device).cpu()  # there and back, because the meta device holds no values
    except (RuntimeError, AssertionError, TypeError) as error:
        raise InputError(f"device {device!r} is not usable here: {first_line(error)}") from None
