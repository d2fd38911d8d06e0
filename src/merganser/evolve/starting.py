"""From a run file to a running study, and from a finished one to the winner's recipe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from merganser.errors import InputError
from merganser.evaluate.examiners import Asked, embeddings
from merganser.evolve import runfile
from merganser.evolve.preparation import Calibration
from merganser.evolve.runfile import Run
from merganser.evolve.running import Listener
from merganser.evolve.store import Trial
from merganser.evolve.study import Study


def start(
    run: str | PathLike[str],
    study: str | PathLike[str],
    *,
    resume: bool = False,
    workers: int | None = None,
    ray: str | None = None,
    listen: Listener | None = None,
) -> Study:
    """Run the study a run file describes, in the file `study`; with `resume`, go on with the one that is there.

    A resumed study goes by the run file it was started with; if `run` says something else now, that is an error.
    """
    loaded = runfile.load(run)
    opened = Study.open(study)
    stored = opened.store.get("run")
    if stored is not None and not resume:
        raise InputError(
            f"{study}: holds a study already; go on with it (--resume, resume=True), or choose another file"
        )
    if stored is not None and runfile.parse(stored["text"], stored["root"]).design != loaded.design:
        raise InputError(f"{run}: differs from the run file that {study} was started with; start another study")
    if stored is None:
        opened.store.set("run", {"text": loaded.text, "root": str(Path(loaded.root).resolve())})
        opened.store.set("design", loaded.design.to_json())
    opened.resume(
        loaded.evaluate,
        calibration=_with_embeddings(loaded, opened),
        workers=workers or loaded.workers,
        ray=ray,
        listen=listen,
    )
    return opened


def recipe(study: Study, trial: Trial) -> dict[str, Any]:
    """The recipe of a trial: `merganser merge` of it gives the weights that were evaluated, bit for bit."""
    stored = study.store.get("run")
    if stored is None:
        raise InputError(f"{study.store.path}: this study was not started from a run file, so it has no recipe")
    if trial.values is None:
        raise InputError("an endpoint is a model, not a merge")
    evaluate = runfile.parse(stored["text"], stored["root"]).evaluate
    return evaluate.space.recipe(evaluate.template, evaluate.labels, trial.values)


def _with_embeddings(run: Run, study: Study) -> Mapping[str, Calibration]:
    """Calibrations with the endpoints' embeddings for the tasks that cluster by them and are not prepared yet."""
    known = dict(run.calibration)
    for task in run.design.tasks:
        if task.extractor != "representation" or study.store.artifact(f"prepared/{task.name}"):
            continue
        examiner = run.evaluate.examiners[task.name]
        if not isinstance(examiner, Asked):
            raise InputError(f"task {task.name!r}: a function has no texts to embed; choose another extractor")
        with torch.inference_mode():
            found = tuple(
                embeddings(run.evaluate.live.load(label), examiner, range(task.items)).numpy()
                for label in run.design.endpoints
            )
        known[task.name] = replace(known.get(task.name, Calibration()), embeddings=found)
    return known
