"""Which merge to take without any data: the one that was never far behind the best in what is stored.

    python -m benchmarks.auto_defaults

A second, as nothing is measured: the validation accuracies by method and scale of `multi_task`, `multi_task_images`,
`auto`, `auto_images` and `auto_language` are compared. A default is a method at a fixed scale, or at one that falls
with the root of the number of experts T. It is judged by how far it is behind the best method at its best scale, mean
over the sets of a kind of model, in the kind where that is most. The default chosen by the other kinds of models alone
tells how sure this is. Prints what `merganser.tuning.autopilot.defaults` says.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from benchmarks.answers import accuracies
from benchmarks.records import stored
from benchmarks.reporting.sections.multi_task import Sheet, sheets
from merganser.tuning.autopilot.contenders import METHODS, PLAIN
from merganser.tuning.autopilot.defaults import MeasuredSet

#: The methods of the autopilot, as the tables of several tasks call them.
ROWS = dict(zip(METHODS, ("task arithmetic", "TIES", "TSV-M", "Iso-C", "Iso-CTS", "WUDI", "ACE"), strict=True))
#: The scales that are tried: as they are, and times 1/√T.
FIXED, ROOTS = (0.5, 0.7, 1.0, 1.4, 2.0), (1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0)
#: Grids of three experts, by kind of model.
GRIDS = {"text": "auto", "images": "auto_images", "language models": "auto_language"}


@dataclass(frozen=True)
class Default:
    """A method, and its scale: `factor`, or with `root` factor/√T. The scale of a plain sum is 1/T of that."""

    method: str
    factor: float
    root: bool

    def scale(self, experts: int) -> float:
        return self.factor / (math.sqrt(experts) if self.root else 1) / (experts if self.method == PLAIN else 1)


DEFAULTS = [
    Default(method, factor, root)
    for method in METHODS
    for root in (False, True)
    for factor in (ROOTS if root else FIXED)
]


@dataclass(frozen=True)
class Curves:
    """The validation accuracy of methods by scale, for one set of experts, and that of the experts, if known."""

    kind: str
    experts: int
    methods: Mapping[str, Mapping[float, float]]
    own: float | None

    @property
    def best(self) -> float:
        return max(max(curve.values()) for curve in self.methods.values())

    def behind(self, default: Default) -> float:
        """How far a default is behind the best; accuracies between measured scales are on a line over log scale."""
        curve = self.methods[default.method]
        scales = sorted(curve)
        found = np.interp(math.log(default.scale(self.experts)), np.log(scales), [curve[each] for each in scales])
        return self.best - float(found)


def measured() -> list[Curves]:
    """Everything that is stored."""
    found = []
    for kind, record in (("text", "multi_task"), ("images", "multi_task_images")):
        for count, sheet in sheets(stored(record)["results"]).items():
            methods = {method: _sweep(sheet, row) for method, row in ROWS.items() if row in sheet.stored}
            own = fmean(accuracies(sheet.experts, next(iter(sheet.experts))).values())
            found.append(Curves(kind, count, methods, own))
    for kind, record in GRIDS.items():
        results = stored(record)["results"]
        grid: dict[str, dict[float, float]] = {}
        for row in results["grid"]:
            grid.setdefault(row["method"], {})[row["scale"]] = row["accuracy"]
        own = fmean(results["experts"].values()) if "experts" in results else None
        found.append(Curves(kind, len(results["tasks"]), grid, own))
    return found


def _sweep(sheet: Sheet, row: str) -> dict[float, float]:
    return {float(alpha): accuracy for alpha, accuracy in sheet.stored[row]["sweep"].items()}


def worst(default: Default, sets: Sequence[Curves]) -> float:
    """How far a default is behind the best, in the kind of model where that is most."""
    kinds = {each.kind for each in sets}
    return max(fmean(each.behind(default) for each in sets if each.kind == kind) for kind in kinds)


def choose(sets: Sequence[Curves]) -> Default:
    """The default that is least behind where it is most behind."""
    return min(DEFAULTS, key=lambda default: worst(default, sets))


def judge(default: Default, sets: Sequence[Curves]) -> tuple[MeasuredSet, ...]:
    """What the default loses in every set, and what one loses that was chosen by other kinds of models."""
    rows = []
    for each in sets:
        other = choose([one for one in sets if one.kind != each.kind])
        kept = None if each.own is None else round((each.best - each.behind(default)) / each.own, 3)
        behind, blind = (round(each.behind(one), 3) for one in (default, other))
        rows.append(MeasuredSet(each.kind, each.experts, behind, blind, kept))
    return tuple(rows)


def main() -> None:
    sets = measured()
    chosen = choose(sets)
    print(chosen)
    for row in judge(chosen, sets):
        print(row)


if __name__ == "__main__":
    main()
