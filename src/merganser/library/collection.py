"""What libraries of either kind have in common: their experts by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

from merganser.excerpts import list_some

#: Names that a representation shows.
_SHOWN = 6


class ExpertCollection(ABC):
    """Experts of one base in a directory, which know their number and names."""

    path: Path

    @property
    @abstractmethod
    def experts(self) -> tuple[str, ...]:
        """The names of the experts."""

    def __len__(self) -> int:
        return len(self.experts)

    def __contains__(self, name: object) -> bool:
        return name in self.experts

    def __iter__(self) -> Iterator[str]:
        return iter(self.experts)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.path}: {len(self)} experts: {list_some(self.experts, _SHOWN)}>"
