"""Trying again what may go better the next time: with growing pauses, and an end."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TypeVar

from merganser.errors import CheckpointError, MerganserError

T = TypeVar("T")
TRIES = 6
#: For what is opened: a wrong address should not take long to be found out.
TRIES_TO_OPEN = 4
#: Seconds before the second try; each pause is twice as long as the one before, give or take a third.
PAUSE = 0.25
LONGEST_PAUSE = 60.0


class TransientError(Exception):
    """Something that may go better the next time; `wait` is how many seconds the server asks for."""

    def __init__(self, message: str, wait: float = 0.0) -> None:
        super().__init__(message)
        self.wait = min(wait, LONGEST_PAUSE)


def retry(attempt: Callable[[], T], what: str, *, opening: bool = False) -> T:
    """Return what `attempt` returns, which may raise `TransientError` a few times before.

    Raises:
        CheckpointError: If it fails every time while something is opened.
        MerganserError: If it fails every time later.
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
                    f"{what}: {error}, {tries} times in a row; what is finished is kept, and the same with resume=True "
                    "goes on"
                ) from error
            time.sleep(max(error.wait, PAUSE * 2**number * random.uniform(0.67, 1.33)))
    raise AssertionError("the last try returns or raises")
