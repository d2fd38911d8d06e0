"""What a running study tells its watchers, and what is left to do."""

from __future__ import annotations

from dataclasses import dataclass

from merganser.evolve.design import Design
from merganser.evolve.store import Store, Trial


@dataclass(frozen=True)
class Forecast:
    """What is left of the search: trials, items they will be asked, seconds until its workers are done with them."""

    trials: int
    evaluations: int
    seconds: float


@dataclass(frozen=True)
class Event:
    """What happened: a phase (calibrate, search, stability, rerank, test, done), and the trial that ended, if any."""

    phase: str
    done: int
    total: int
    trial: Trial | None = None
    forecast: Forecast | None = None


def forecast(store: Store, design: Design) -> Forecast:
    """Trials to come at the mean pace of those evaluated; before the first, at the endpoints' pace per item.

    NaN seconds when nothing was evaluated yet.
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
