"""Trying again what may go better the next time: with growing pauses, and an end."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TypeVar

from merganser.errors import MerganserError

T = TypeVar("T")
TRIES = 6
#: Seconds before the second try; each pause is twice as long as the one before, give or take a third.
PAUSE = 0.25
LONGEST_PAUSE = 60.0


class TransientError(Exception):
    """Something that may go better the next time; `wait` is how many seconds the server asks for."""

    def __init__(self, message: str, wait: float = 0.0) -> None:
        super().__init__(message)
        self.wait = min(wait, LONGEST_PAUSE)


def retry(attempt: Callable[[], T], what: str) -> T:
    """Return what `attempt` returns, which may raise `TransientError` a few times before.

    Raises:
        MerganserError: If it fails every time.
    """
    for number in range(TRIES):
        try:
            return attempt()
        except TransientError as error:
            if number == TRIES - 1:
                raise MerganserError(
                    f"{what}: {error}, {TRIES} times in a row; what is finished is kept, and the same with resume=True "
                    "goes on"
                ) from error
            time.sleep(max(error.wait, PAUSE * 2**number * random.uniform(0.67, 1.33)))
    raise AssertionError("the last try returns or raises")
