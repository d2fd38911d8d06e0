"""Retry temporary failures with growing pauses, a limited number of times."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TypeVar

from merganser.errors import CheckpointError, MerganserError

T = TypeVar("T")
TRIES = 6
#: Fewer tries while opening, so that a wrong address is reported soon.
TRIES_TO_OPEN = 4
#: Seconds before the second try; each pause is twice as long as the last, give or take a third.
PAUSE = 0.25
LONGEST_PAUSE = 60.0


class TransientError(Exception):
    """A temporary failure; `wait` is the number of seconds that the server asks for."""

    def __init__(self, message: str, wait: float = 0.0) -> None:
        super().__init__(message)
        self.wait = min(wait, LONGEST_PAUSE)


def retry(attempt: Callable[[], T], what: str, *, opening: bool = False) -> T:
    """Return the result of `attempt`, repeated while it raises `TransientError`.

    Raises:
        CheckpointError: If it fails every time while opening.
        MerganserError: If it fails every time after opening.
    """
    tries = TRIES_TO_OPEN if opening else TRIES
    for number in range(tries):
        try:
            return attempt()
        except TransientError as error:
            if number == tries - 1 and opening:
                raise CheckpointError(f"{what}: {error}, {tries} times in a row; is the address right?") from error
            if number == tries - 1:
                raise MerganserError(
                    f"{what}: {error}, {tries} times in a row; finished tensors are kept: continue with resume=True"
                ) from error
            time.sleep(max(error.wait, PAUSE * 2**number * random.uniform(0.67, 1.33)))
    raise AssertionError("the last try returns or raises")
