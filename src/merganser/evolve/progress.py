"""Progress of a running study, and what is left to do."""

from __future__ import annotations

from dataclasses import dataclass

from merganser.evolve.design import Design
from merganser.evolve.store import Store, Trial


@dataclass(frozen=True)
class Forecast:
    """The rest of the search: trials, items to ask, and seconds until the workers are done."""

    trials: int
    evaluations: int
    seconds: float


@dataclass(frozen=True)
class Event:
    """An event: a phase (calibrate, search, stability, rerank, test, done), and the trial that ended, if any."""

    phase: str
    done: int
    total: int
    trial: Trial | None = None
    forecast: Forecast | None = None


def forecast(store: Store, design: Design) -> Forecast:
    """Forecast the remaining trials at the mean pace so far; before the first, at the endpoints' pace per item.

    Seconds are NaN if nothing was evaluated yet.
    """
    count, evaluated, seconds = store.pace("candidate")
    size = sum(task.subset or task.pool for task in design.tasks)
    left = max(0, design.trials - count)
    workers = int(store.get("workers") or 1)
    if evaluated:
        return Forecast(left, left * size, left * seconds / evaluated / workers)
    calibrated = [t for t in store.trials("endpoint") if t.state == "done"]
    asked = sum(len(a.items) for t in calibrated for name, a in store.answers(t).items() if "." not in name)
    pace = sum(t.seconds for t in calibrated) / asked if asked else float("nan")
    return Forecast(left, left * size, left * size * pace / workers)
