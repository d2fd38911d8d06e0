"""A study: prepare, search, and score the winner on items nothing has seen. Resumable at any point.

study = Study.open("study.sqlite")
study.run(design, evaluate, workers=4)      # killed here …
Study.open("study.sqlite").resume(evaluate) # … continues here, with the trials of an uninterrupted run
study.best().values
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from os import PathLike

from merganser.engine.disk import Disk
from merganser.engine.lock import Lock
from merganser.errors import InputError, MerganserError
from merganser.evolve import ranking
from merganser.evolve.costs import Forecast, StudyCost, forecast, measure_cost
from merganser.evolve.design import Design
from merganser.evolve.preparation import Calibration, Prepared, read_prepared
from merganser.evolve.runfile import RunFile
from merganser.evolve.running import Listener, StudyRun
from merganser.evolve.schema import from_document, to_document
from merganser.evolve.store import Store, Trial
from merganser.evolve.workers import Evaluate
from merganser.notebooks import Shown


class Study(Shown):
    """One study in one SQLite file.

    Args:
        store: The file; use `Study.open(path)`.

    Example:
        >>> study = mg.evolve.Study.open("study.sqlite")
        >>> study.close()
    """

    def __init__(self, store: Store) -> None:
        self.store = store

    @classmethod
    def open(cls, path: str | PathLike[str], *, readonly: bool = False) -> Study:
        """Open the study at `path`, or create an empty one; `readonly` to watch it while it runs elsewhere."""
        return cls(Store(path, readonly=readonly))

    def close(self) -> None:
        self.store.close()

    def __enter__(self) -> Study:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @cached_property
    def design(self) -> Design:
        """Return the design; a `RunFile` if the study was started from one."""
        document = self.store.get("design")
        if document is None:
            raise InputError(f"{self.store.path}: an empty study; run a design first")
        try:
            return from_document(RunFile if "method" in document else Design, document)
        except (InputError, TypeError) as error:
            raise InputError(f"{self.store.path}: its design is damaged: {error}; start a new study") from error

    def run(
        self,
        design: Design,
        evaluate: Evaluate,
        *,
        calibration: Mapping[str, Calibration] | None = None,
        workers: int = 1,
        ray: str | None = None,
        on_event: Listener | None = None,
        inputs: Mapping[str, str] | None = None,
    ) -> Trial | None:
        """Run a new study to its end; return the winner, or None if there are several objectives.

        `inputs` are hashes of what answers depend on besides the design, by name; they are stored with it.
        """
        if self.store.get("design") is not None:
            raise InputError(f"{self.store.path}: already contains a study; resume it, or choose another file")
        with self._lock():
            run = StudyRun(self.store, design, evaluate, calibration, workers, ray, on_event)
            # Everything invalid has been refused by now, without changing the file.
            self.store.set(design=to_document(design), inputs=dict(inputs or {}))
            return self._complete(run)

    def resume(
        self,
        evaluate: Evaluate,
        *,
        calibration: Mapping[str, Calibration] | None = None,
        workers: int = 1,
        ray: str | None = None,
        on_event: Listener | None = None,
    ) -> Trial | None:
        """Continue from the file; finished trials are replayed, not evaluated again."""
        with self._lock():
            return self._complete(StudyRun(self.store, self.design, evaluate, calibration, workers, ray, on_event))

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Refuse to run a study that another process runs: both would do the same work, and the first would fail."""
        lock = Lock(self.store.path, Disk())
        try:
            yield
        finally:
            lock.release()

    def _complete(self, run: StudyRun) -> Trial | None:
        if self.failure is not None:
            self.store.set(failure=None)
        try:
            run.prepare()
            run.search()
            run.conclude()
        except MerganserError as error:
            self.store.set(failure=str(error))
            raise
        finally:
            run.close()
        return self.best() if len(run.design.objectives) == 1 else None

    @property
    def ended(self) -> bool:
        """Return whether the run has ended, including final scores."""
        return bool(self.store.get("ended"))

    @property
    def failure(self) -> str | None:
        """Return why the run ended without finishing the study; resuming tries again."""
        reason: str | None = self.store.get("failure")
        return reason

    def trials(self) -> list[Trial]:
        """Return every candidate of the search, in order."""
        return self.store.trials("candidate")

    def best(self, objective: str | None = None) -> Trial:
        """Return the valid trial with the best value of the objective (the only one, if not named); the first of
        equals.

        After the best candidates were evaluated on the whole pool (`rerank`), returns the best of them there.
        """
        design, trials = self.design, self.trials()
        chosen = ranking.choose_objective(design.objectives, objective)
        again = ranking.choose_reranked(trials, self.store.trials("full"), chosen) if design.search.rerank else None
        return again or ranking.best(trials, design.objectives, objective)

    def pareto(self) -> list[Trial]:
        """Return the valid trials that no other one dominates; after members of the front were evaluated on the
        whole pool (`rerank`), those that none dominates there.
        """
        design, trials = self.design, self.trials()
        full = self.store.trials("full") if design.search.rerank and len(design.objectives) > 1 else []
        return ranking.find_reranked_front(trials, full, design.objectives) or ranking.pareto(trials, design.objectives)

    def prepared(self) -> dict[str, Prepared]:
        """Return the prepared tasks: splits, subsets, estimators."""
        return read_prepared(self.store, self.design.tasks)

    def test_scores(self, trial: Trial | str) -> dict[str, float] | None:
        """Return mean answers of a trial, or of an endpoint by label, to the test items, if it was tested."""
        label = trial if isinstance(trial, str) else trial.label
        tested = [t for t in self.store.trials("test", label) if t.state == "done"]
        return dict(tested[-1].objectives) if tested else None

    def test_error(self, trial: Trial | str) -> str | None:
        """Return why a trial or an endpoint has no test score; None if it has one, or was not tested yet."""
        tested = self.store.trials("test", trial if isinstance(trial, str) else trial.label)
        return None if not tested or any(t.state == "done" for t in tested) else tested[-1].reason

    def cost(self) -> StudyCost:
        """What the study has cost so far: questions, seconds, operations."""
        return measure_cost(self.store, sum(task.pool for task in self.design.tasks.values()))

    def forecast(self) -> Forecast:
        """Return a forecast of the rest of the study, from the times so far."""
        return forecast(self.store, self.design)
