"""What a section of the results is made of. Figures are data until they are drawn, so that a drawing can be checked
without drawing it again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias

#: The version of `drawing`: figures are drawn again when it grows.
LOOK = 3

Points: TypeAlias = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Text:
    text: str


@dataclass(frozen=True)
class Table:
    """Cells are strings as they will be read; see `formats`."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""


@dataclass(frozen=True)
class Axis:
    label: str = ""
    log: bool = False
    percent: bool = False
    whole: bool = False
    limits: tuple[float, float] | None = None


@dataclass(frozen=True)
class Lines:
    """Named lines through points; `spread` is ± around each point of a line. `scatter` draws the points alone."""

    series: Mapping[str, Points]
    x: Axis = Axis()
    y: Axis = Axis()
    title: str = ""
    spread: Mapping[str, Sequence[float]] = field(default_factory=dict)
    levels: Mapping[str, float] = field(default_factory=dict)
    scatter: bool = False


@dataclass(frozen=True)
class Bars:
    """A horizontal bar for each name and series; a missing value is None. Bars begin at zero; `dots` need not, and
    show small differences."""

    names: Sequence[str]
    series: Mapping[str, Sequence[float | None]]
    x: Axis = Axis()
    title: str = ""
    label: str = "{:.0f}"
    errors: Mapping[str, Sequence[float]] = field(default_factory=dict)
    dots: bool = False


@dataclass(frozen=True)
class Plane:
    """Accuracies (0 to 1) over a grid of points, `values[y][x]`, and the points where the networks are."""

    xs: Sequence[float]
    ys: Sequence[float]
    values: Sequence[Sequence[float]]
    corners: Points
    title: str = ""


Panel: TypeAlias = Lines | Bars | Plane


@dataclass(frozen=True)
class Figure:
    """One or several panels side by side, stored as docs/images/NAME.svg."""

    name: str
    alt: str
    panels: Sequence[Panel]

    def digest(self) -> str:
        """What the figure shows, in a few digits."""
        kinds = [type(panel).__name__ for panel in self.panels]
        content: Any = {**asdict(self), "kinds": kinds, "look": LOOK}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


Part: TypeAlias = Text | Table | Figure
