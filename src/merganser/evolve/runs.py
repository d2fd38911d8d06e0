"""Start a study from a run file, and get the winner's recipe from a finished one."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from merganser.checkpoints.hashing import content_hash
from merganser.checkpoints.opening import open as open_checkpoint
from merganser.errors import InputError
from merganser.evaluate.examiners import embeddings
from merganser.evaluate.questions import Asked
from merganser.evolve import calibrations
from merganser.evolve.fitness import MergedModels
from merganser.evolve.loading import LoadedRun, load
from merganser.evolve.preparation import Calibration
from merganser.evolve.runfile import RunFile
from merganser.evolve.running import Listener
from merganser.evolve.store import Trial
from merganser.evolve.study import Study


def start(
    run: str | PathLike[str] | LoadedRun,
    study: str | PathLike[str],
    *,
    resume: bool = False,
    workers: int | None = None,
    ray: str | None = None,
    on_event: Listener | None = None,
) -> Study:
    """Run the study that a run file describes.

    Args:
        run: The run file.
        study: The file of the study.
        resume: Continue an existing study. The run file, the weights and the data must be the same.
        workers: The number of processes.
        ray: The address of a Ray cluster.
        on_event: Called with the progress.

    Returns:
        The finished study.

    Raises:
        InputError: If the run file is invalid, or a resumed study was started with another one.

    Example:
        >>> study = mg.evolve.start("run.yml", "study.sqlite")  # doctest: +SKIP
    """
    loaded = run if isinstance(run, LoadedRun) else load(run)
    if resume and not Path(study).is_file():
        raise InputError(f"{study}: no such study to resume; to start it, leave out resume=True")
    opened = Study.open(study)
    try:
        known = opened.store.get("design") is not None
        if known:
            _check_same_study(loaded, opened, resume)
        settings: dict[str, Any] = {
            "calibration": _with_embeddings(loaded, opened),
            "workers": loaded.design.workers if workers is None else workers,
            "ray": ray,
            "on_event": on_event,
        }
        if known:
            opened.resume(loaded.evaluate, **settings)
        else:
            opened.run(loaded.design, loaded.evaluate, **settings, files=_hash_files(loaded.design))
    except BaseException:
        opened.close()
        raise
    return opened


def recipe(study: Study, trial: Trial) -> dict[str, Any]:
    """Return the recipe of a trial; merging it gives the weights that were evaluated, bit for bit.

    Args:
        study: The study.
        trial: One of its trials.

    Returns:
        A recipe for `mg.run`.

    Example:
        >>> study = mg.evolve.start("run.yml", "study.sqlite")  # doctest: +SKIP
        >>> mg.run(mg.evolve.recipe(study, study.best()), "winner")  # doctest: +SKIP
    """
    if not isinstance(study.design, RunFile):
        raise InputError(f"{study.store.path}: this study was not started from a run file, so it has no recipe")
    if trial.values is None:
        raise InputError("an endpoint is a model, not a merge")
    return study.design.recipe(trial.values)


def _check_same_study(loaded: LoadedRun, study: Study, resume: bool) -> None:
    """Refuse to continue an existing study unless asked to, and only with the same run file and the same files."""
    place, started = study.store.path, study.design
    if not isinstance(started, RunFile):
        raise InputError(f"{place}: contains a study that was started from Python; choose another file")
    if not resume:
        raise InputError(f"{place}: already contains a study; continue it (resume=True), or choose another file")
    if not loaded.design.is_same_study(started):
        raise InputError(
            f"{loaded.source}: differs from the run file that {place} was started with; start another study"
        )
    before, now = study.store.get("files") or {}, _hash_files(loaded.design)
    if changed := [path for path in before if before[path] != now.get(path)]:
        raise InputError(f"{changed[0]}: has changed since {place} was started; start another study")


def _hash_files(run: RunFile) -> dict[str, str]:
    """Return hashes of the weights and data that a run file names, by path."""
    models = dict.fromkeys([*([run.base] if run.base else []), *run.models.values()])
    found = {path: content_hash(open_checkpoint(path)) for path in models}
    for entry in run.tasks.values():
        test = entry.test if isinstance(entry.test, str) else None
        calibration = [] if entry.calibration is None else calibrations.find_files(entry.calibration)
        for path in (entry.data, test, entry.options.get("examples"), *calibration):
            if isinstance(path, str) and Path(path).is_file():
                found[path] = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    return found


def _with_embeddings(run: LoadedRun, study: Study) -> Mapping[str, Calibration]:
    """Return calibrations with the endpoints' embeddings, for unprepared tasks that cluster by them."""
    known = dict(run.calibration)
    for name, task in run.design.tasks.items():
        if task.extractor != "representation" or study.store.artifact(f"prepared/{name}"):
            continue
        examiner = run.evaluate.examiners[name]
        assert isinstance(examiner, Asked)  # both checked with the run file
        assert isinstance(run.evaluate, MergedModels)
        with torch.inference_mode():
            found = tuple(
                embeddings(run.evaluate.live.load(label), examiner, range(task.items)).numpy()
                for label in run.design.endpoints
            )
        known[name] = replace(known.get(name, Calibration()), embeddings=found)
    return known
