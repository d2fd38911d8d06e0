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
from merganser.evaluate.fingerprints import hash_examiner, hash_module
from merganser.evaluate.loaders import Loader
from merganser.evaluate.model_files import hash_settings
from merganser.evaluate.questions import Asked
from merganser.evolve import calibrations
from merganser.evolve.fitness import MergedModels
from merganser.evolve.loading import LoadedRun, load
from merganser.evolve.preparation import Calibration
from merganser.evolve.runfile import READ, RunFile
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
            "calibration": _add_embeddings(loaded, opened),
            "workers": loaded.design.workers if workers is None else workers,
            "ray": ray,
            "on_event": on_event,
        }
        if known:
            opened.resume(loaded.evaluate, **settings)
        else:
            opened.run(loaded.design, loaded.evaluate, **settings, inputs=_hash_inputs(loaded))
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
    difference = loaded.design.difference(started)
    before, now = study.store.get("inputs") or {}, _hash_inputs(loaded)
    changed = [each for each in (*before, *now) if before.get(each) != now.get(each)]
    if difference and (not changed or difference.rpartition(".")[2] not in READ):
        raise InputError(
            f"{loaded.source}: {difference} differs from the run file that {place} was started with; start another "
            "study"
        )
    for each in changed:
        how = "is new" if each not in before else "is gone" if each not in now else "has changed"
        raise InputError(f"{each} {how} since {place} was started; start another study")


def _hash_inputs(loaded: LoadedRun) -> dict[str, str]:
    """Return a hash of everything besides the run file that decides answers: weights, the files beside them, code,
    questions and how they are asked, calibrations.
    """
    run, evaluate = loaded.design, loaded.evaluate
    models = dict.fromkeys([*([run.base] if run.base else []), *run.models.values()])
    found = {path: content_hash(open_checkpoint(path)) for path in models}
    if isinstance(evaluate, MergedModels) and isinstance(evaluate.module, Loader):
        found |= hash_module(evaluate.module)
    for path in (*models, run.model.tokenizer):
        found |= hash_settings(path) if path else {}
    for name, entry in run.tasks.items():
        for part, digest in hash_examiner(evaluate.examiners[name]).items():
            found[part if entry.kind == "function" else f"tasks.{name}.{part}"] = digest
        for path in [] if entry.calibration is None else calibrations.find_files(entry.calibration):
            found[path] = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    return found


def _add_embeddings(run: LoadedRun, study: Study) -> Mapping[str, Calibration]:
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
