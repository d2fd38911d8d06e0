"""A cache of the last few results."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Recent(Generic[T]):
    """The last few results by name, or all of them, each computed once for all threads."""

    def __init__(self, size: int | None = None) -> None:
        self._size = size
        self._lock = threading.RLock()
        self._held: OrderedDict[str, T] = OrderedDict()

    def get(self, name: str, make: Callable[[], T]) -> T:
        """Return the result of this name, made now if it is not held."""
        with self._lock:
            if name not in self._held:
                self._held[name] = make()
                if self._size is not None and len(self._held) > self._size:
                    self._held.popitem(last=False)
            return self._held[name]
