"""What a live module keeps from one merge to the next: states of rules, and task vectors that are costly to thin."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from merganser.checkpoints.stored_entries import StoredEntries


class Kept:
    """Results of earlier merges of the same sources, each with everything that it depends on.

    Args:
        room: The number of bytes that thinned task vectors may take. Those that do not fit are thinned again every
            time, which gives the same bits.
    """

    def __init__(self, room: int = 0) -> None:
        self._room = room
        self._states: dict[str, tuple[Any, Any]] = {}
        self._vectors: dict[Hashable, tuple[Any, Sequence[StoredEntries], int]] = {}
        self._lock = threading.Lock()
        #: The number of bytes that thinned task vectors take.
        self.held = 0

    def state(self, output: str, cause: Any, compute: Callable[[], Any]) -> Any:
        """Return the state of an output with this cause, computed now if it is not kept."""
        if output not in self._states or self._states[output][0] != cause:
            self._states[output] = cause, compute()
        return self._states[output][1]

    def vectors(
        self, place: Hashable, cause: Any, nbytes: int, compute: Callable[[], Sequence[StoredEntries] | None]
    ) -> Sequence[StoredEntries] | None:
        """Return the thinned task vectors at a place, computed now if they are not kept.

        Args:
            place: The output, and the part of it.
            cause: Everything that they depend on.
            nbytes: The memory that they take.
            compute: Computes them; returns None if it cannot.

        Returns:
            The task vectors; None if they cannot be computed or there is no room for them.
        """
        with self._lock:
            known = self._vectors.get(place)
            if known is not None and known[0] == cause:
                return known[1]
            self._drop(place)
            if self.held + nbytes > self._room:
                return None
            self.held += nbytes
            self._vectors[place] = None, (), nbytes  # reserved
        computed = compute()
        with self._lock:
            if computed is None:
                self._drop(place)
            else:
                self._vectors[place] = cause, computed, nbytes
        return computed

    def _drop(self, place: Hashable) -> None:
        self.held -= self._vectors.pop(place, (None, (), 0))[2]

    def forget_vectors(self) -> None:
        """Release the memory of thinned task vectors."""
        with self._lock:
            self._vectors.clear()
            self.held = 0
