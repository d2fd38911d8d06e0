"""The cost of a study: seconds of merging, asking and fitting, operations of the questions, and what is left to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from merganser.evolve.design import Design
    from merganser.evolve.store import Store, Trial

#: The parts of a study, by kind of trial.
PARTS = {
    "candidate": "search",
    "endpoint": "calibration",
    "full": "full evaluation at the end",
    "test": "test",
    "quantized": "bias of quantisation",
}
#: Seconds of `loading` (once per worker), `merging` and `asking`, and `flops` of the questions.
Costs: TypeAlias = Mapping[str, float]


def add_costs(left: Costs, right: Costs) -> dict[str, float]:
    """Return the sum of two costs, name by name."""
    return {name: left.get(name, 0.0) + right.get(name, 0.0) for name in (*left, *(n for n in right if n not in left))}


@dataclass(frozen=True)
class PartCost:
    """The cost of a part of a study, for one worker: seconds of merging and asking, and FLOPs of its questions."""

    name: str
    models: int
    questions: int
    merging: float
    asking: float
    flops: float


@dataclass(frozen=True)
class StudyCost:
    """The cost of a study.

    Attributes:
        asked: Questions asked of candidates.
        full: Questions that full evaluations of all candidates would have asked.
        calibration: Questions asked of endpoints for calibration.
        again: Questions asked of candidates at the end (re-ranking, stability).
        models: Candidates that were evaluated.
        search_seconds: Seconds of one worker for the candidates, including merging, without loading.
        seconds: Seconds of one worker for everything.
        loading: Seconds of building the network and opening the models, once per worker.
        fitting: Seconds of fitting estimators.
        parts: The cost of each part.
    """

    asked: int
    full: int
    calibration: int
    again: int
    models: int
    search_seconds: float
    seconds: float
    loading: float
    fitting: float
    parts: tuple[PartCost, ...]

    @property
    def models_per_hour(self) -> float:
        """Return the number of candidates that one worker evaluates in an hour."""
        return 3600 * self.models / self.search_seconds if self.search_seconds > 0 else float("nan")

    @property
    def saved(self) -> float:
        """Return the factor of saved questions, including those for calibration and re-ranking."""
        return self.full / max(1, self.asked + self.calibration + self.again)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "saved": self.saved, "models_per_hour": self.models_per_hour}

    def describe(self) -> str:
        """Describe the cost of the search in one line."""
        merging, flops = sum(part.merging for part in self.parts), sum(part.flops for part in self.parts)
        said = (
            f"{self.models} models were merged and asked {self.asked / max(self.models, 1):.0f} questions each: "
            f"{self.models_per_hour:,.0f} models per hour and worker"
        )
        if self.seconds > 0 and merging:
            said += f"; merging took {merging / self.seconds:.0%} of the time"
        return said + (f", the questions {show_flops(flops)}" if flops else "")


def measure_cost(store: Store, pool: int) -> StudyCost:
    """Return the cost of a study so far; `pool` is the number of items of a full evaluation."""
    spent = store.costs()
    done = [trial for trial in store.trials() if trial.state == "done" and trial.cached_from is None]
    evaluated = [trial for trial in done if trial.kind == "candidate"]
    parts = tuple(
        PartCost(
            name,
            sum(trial.kind == kind for trial in done),
            store.asked(kind),
            *(spent.get(kind, {}).get(each, 0.0) for each in ("merging", "asking", "flops")),
        )
        for kind, name in PARTS.items()
    )
    asked, calibration, again, *_ = (part.questions for part in parts)
    return StudyCost(
        asked=asked,
        full=pool * len(evaluated),
        calibration=calibration,
        again=again,
        models=len(evaluated),
        search_seconds=sum(trial.seconds for trial in evaluated) - spent.get("candidate", {}).get("loading", 0.0),
        seconds=sum(trial.seconds for trial in store.trials()),
        loading=sum(each.get("loading", 0.0) for each in spent.values()),
        fitting=spent.get("fitting", {}).get("seconds", 0.0),
        parts=parts,
    )


def show_flops(flops: float) -> str:
    """Return operations in a readable unit, such as `3.2 TFLOPs`."""
    for unit, size in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9)):
        if flops >= size:
            return f"{flops / size:.3g} {unit}FLOPs"
    return f"{flops / 1e6:.3g} MFLOPs"


@dataclass(frozen=True)
class Forecast:
    """The rest of a study: trials of the search, items to ask them, and seconds until the study ends."""

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
    """Forecast the rest of a study, at the pace of its candidates so far; before the first, at the endpoints' pace.

    Counts the remaining candidates, the full evaluations at the end and the test. The time that workers take to load
    the models is not part of the pace. In a race, candidates to come are expected to be asked as many items as those
    that raced so far. Seconds are NaN if nothing was evaluated yet.
    """
    count, _ = store.pace("candidate")
    size = sum(task.asked for task in design.tasks.values())
    left = max(0, design.search.trials - count)
    each = size if not design.search.race else _expect_raced(store, design, count, size)
    models, items = left, left * each
    for kind, (number, share) in _count_final_evaluations(design).items():
        rest = max(0, number - store.pace(kind)[0])
        models, items = models + rest, items + rest * share
    per_model, per_item = _measure_pace(store, "candidate" if count else "endpoint")
    seconds = (models * per_model + items * per_item) / int(store.get("workers") or 1)
    return Forecast(left, round(left * each), seconds)


def _expect_raced(store: Store, design: Design, count: int, size: int) -> float:
    """Return the mean number of items asked of candidates that raced; the first population's starts do not."""
    first = min(count, max(1, len(design.starts)))
    return max(0, store.asked("candidate") - first * size) / (count - first) if count > first else size


def _count_final_evaluations(design: Design) -> dict[str, tuple[int, int]]:
    """Return, by kind of trial, how many models are evaluated after the search, and on how many items each."""
    search, tasks = design.search, design.tasks.values()
    missing, test = sum(task.pool - task.asked for task in tasks), sum(task.items - task.pool for task in tasks)
    winners = search.rerank * len(design.objectives) if missing else 0
    others = len(design.endpoints) + len(design.references)
    tested = others + (1 if len(design.objectives) == 1 else winners)
    return {"full": (search.stability + winners if missing else 0, missing), "test": (tested, test)}


def _measure_pace(store: Store, kind: str) -> tuple[float, float]:
    """Return seconds of merging per model, and of everything else but loading per item asked."""
    (count, seconds), asked, spent = store.pace(kind), store.asked(kind), store.costs().get(kind, {})
    if not count or not asked:
        return float("nan"), float("nan")
    merging = spent.get("merging", 0.0)
    return merging / count, max(0.0, seconds - merging - spent.get("loading", 0.0)) / asked
