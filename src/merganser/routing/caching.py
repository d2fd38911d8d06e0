"""A cache of compositions for recurring sets, limited in bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping

from torch import Tensor

from merganser.routing.composition import Composition


class CompositionCache:
    """The most recently used compositions, up to a number of bytes, keyed by set."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.hits = 0
        self.misses = 0
        self.version = 0
        self._kept: OrderedDict[frozenset[str], Composition] = OrderedDict()
        self._spent: dict[frozenset[str], int] = {}

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def kept(self) -> Mapping[frozenset[str], Composition]:
        """The cached compositions, the least recently used first."""
        return self._kept

    @property
    def nbytes(self) -> int:
        return sum(composition.nbytes for composition in self._kept.values())

    def clear(self) -> None:
        """Drop every composition."""
        self._kept.clear()
        self._spent.clear()

    def follow(self, version: int) -> None:
        """Drop compositions that were made for another version of the module."""
        if version != self.version:
            self.clear()
            self.version = version

    def get(
        self,
        tasks: frozenset[str],
        rows: int,
        compose: Callable[[frozenset[str]], Composition],
        base: Mapping[str, Tensor],
    ) -> Composition:
        """Return the composition for a set and `rows` rows of input.

        Applying low-rank updates costs `per_row` per row; building whole matrices costs `to_build` once. They are built
        as soon as the updates applied to this set, including this time, would have cost more, which is never worse than
        twice the optimum in hindsight. Built matrices are kept only if there is room, and evict no other set; without
        room they are built for this call alone, if that pays.
        """
        if tasks in self._kept:
            self.hits += 1
            self._kept.move_to_end(tasks)
            composition = self._kept[tasks]
        else:
            self.misses += 1
            composition = compose(tasks)
            self._keep(tasks, composition)
        if not composition.low_rank:
            return composition
        now = rows * composition.per_row
        if tasks in self._kept:
            self._spent[tasks] += now
        pays = now > composition.to_build
        stays = self._spent.get(tasks, 0) > composition.to_build and self._room_for_matrices(composition, base)
        if not pays and not stays:
            return composition
        built = composition.materialized(base)
        if stays:
            self._kept[tasks] = built
        return built

    def _room_for_matrices(self, composition: Composition, base: Mapping[str, Tensor]) -> bool:
        matrices = sum(base[name].nbytes for name in composition.low_rank)
        cores = sum(part.core.nbytes for part in composition.low_rank.values())
        return self.nbytes - cores + matrices <= self.capacity

    def _keep(self, tasks: frozenset[str], composition: Composition) -> None:
        if composition.nbytes > self.capacity:
            return
        self._kept[tasks] = composition
        self._spent[tasks] = 0
        while self.nbytes > self.capacity:
            old, _ = self._kept.popitem(last=False)
            del self._spent[old]
