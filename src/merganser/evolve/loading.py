"""Load a run file: check it against the checkpoints and the questions that it names, and build its evaluator.

All problems are reported at once, before any work. Relative paths are resolved beside the file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from merganser.checkpoints.opening import open as open_checkpoint
from merganser.errors import InputError, MerganserError, did_you_mean, reading, require
from merganser.evaluate.loaders import LOADERS, Loader
from merganser.evaluate.questions import Examiner
from merganser.evaluate.references import import_function
from merganser.evaluate.tasks import check_model_kind
from merganser.evolve import calibrations, liveness
from merganser.evolve.examining import build_examiner, choose_test_items, complete_task, directions_of
from merganser.evolve.fitness import MergedModels
from merganser.evolve.layering import LAYERS
from merganser.evolve.population import initial_population
from merganser.evolve.preparation import Calibration, cautions, check_items
from merganser.evolve.quantization import Quantization
from merganser.evolve.runfile import SERVER, RunFile, read_run_file, summarize_problems
from merganser.evolve.served import ServedAdapters, serve_adapters
from merganser.evolve.space import Space
from merganser.evolve.tasks import StudyTask
from merganser.methods.registry import lookup
from merganser.methods.registry import parameters as declared
from merganser.recipes.layers import find_layout

T = TypeVar("T")


@dataclass(frozen=True)
class LoadedRun:
    """A run file completed from the files it names, with its evaluator.

    Attributes:
        design: The run file.
        evaluate: The evaluator of candidates.
        calibration: What is known about the items of tasks.
        source: Where the run file was read, for messages.
        cautions: Warnings to show before the study runs.
    """

    design: RunFile
    evaluate: MergedModels | ServedAdapters
    calibration: Mapping[str, Calibration]
    source: str = "run file"
    cautions: tuple[str, ...] = ()


def load(source: str | os.PathLike[str]) -> LoadedRun:
    """Read and check the run file at `source`."""
    path = Path(source)
    if not path.is_file():
        raise InputError(f"{path}: {'is a directory, not a run file' if path.is_dir() else 'no such run file'}")
    with reading(path, hint="; a run file is YAML"):
        text = path.read_text(encoding="utf-8")
    return parse(text, path.parent, str(path))


def parse(text: str, root: str | Path = ".", source: str = "run file") -> LoadedRun:
    """Parse a run file from its text; relative paths start at `root`."""
    problems: list[str] = []
    try:
        return _Completion(read_run_file(text, root, source), problems).complete(source)
    except _Incomplete:
        raise summarize_problems(problems, source) from None


class _Incomplete(Exception):
    """Problems were found, and the rest cannot be checked without what is wrong."""


class _Completion:
    """Completes a run file, collecting problems."""

    def __init__(self, run: RunFile, problems: list[str]) -> None:
        self.run, self.problems = run, problems

    def complete(self, source: str) -> LoadedRun:
        self._check_parameters()
        self._stop_at_problems()
        space = self._build_space()
        self._try_build("", liveness.check, space, self.run.template)
        examiners, calibration = self._open_tasks()
        tasks = self._complete_tasks(examiners, calibration)
        self._check_measures(examiners)
        if self.run.model.quantize is not None:
            self._try_build("model.quantize", require, "bitsandbytes", "quantize")
        evaluate = self._try_build("model.kind", build_evaluator, self.run, space, examiners)
        self._stop_at_problems()
        completed = self._fill_in(space, examiners, tasks)
        self._stop_at_problems()
        assert completed is not None
        assert evaluate is not None
        warned = [
            caution
            for name, task in tasks.items()
            for caution in cautions(name, task, len(self.run.models), calibration.get(name, Calibration()))
        ]
        return LoadedRun(completed, evaluate, calibration, source, tuple(warned))

    def _build_space(self) -> Space:
        """Return the space of the search, after counting the layers of the models if a parameter needs them."""
        if any(parameter.needs_depth for parameter in self.run.space.values()):
            depth = self._try_build("space", count_layers, self.run) or 0
            self.run = self._try_build("", lambda: replace(self.run, depth=depth)) or self.run
            self._stop_at_problems()
        space = self._try_build("", lambda: self.run.search_space)
        self._stop_at_problems()
        assert space is not None
        return space

    def _complete_tasks(
        self, examiners: Mapping[str, Examiner], calibration: Mapping[str, Calibration]
    ) -> dict[str, StudyTask]:
        """Return the tasks with their numbers of items, and check the calibrations against these."""
        held_out = self._try_build("", choose_test_items, self.run, examiners) or {}
        tasks = dict(self.run.tasks)
        for name, examiner in examiners.items():
            task = self._try_build(f"tasks.{name}", complete_task, name, tasks[name], examiner, held_out.get(name))
            if task is not None:
                tasks[name] = task
                if name in calibration:
                    self._try_build(f"tasks.{name}.calibration", check_items, name, task, calibration[name])
        return tasks

    def _fill_in(self, space: Space, examiners: Mapping[str, Examiner], tasks: dict[str, StudyTask]) -> RunFile | None:
        """Return the run file with completed tasks, the directions of its objectives, and the first merges."""
        run = self.run
        directions = {m: d for name, examiner in examiners.items() for m, d in directions_of(name, examiner).items()}
        directions |= {name: task.direction for name, task in tasks.items() if task.direction}
        known = initial_population(space, run.method, run.parameters, run.search.population // 2)
        starts = (*run.starts, *(each for each in known if each not in run.starts))
        return self._try_build(
            "",
            lambda: replace(
                run,
                tasks=tasks,
                objectives=tuple(objective.directed(directions) for objective in run.objectives),
                starts=starts[: run.search.population],
            ),
        )

    def _try_build(self, where: str, build: Callable[..., T], *args: Any) -> T | None:
        """Return the result of `build`; its error becomes a problem."""
        try:
            return build(*args)
        except MerganserError as error:
            message = str(error).removeprefix(f"{where.rpartition('.')[2]}: ")
            self.problems.append(f"{where}: {message}" if where else message)
        return None

    def _stop_at_problems(self) -> None:
        if self.problems:
            raise _Incomplete

    def _open_tasks(self) -> tuple[dict[str, Examiner], dict[str, Calibration]]:
        examiners: dict[str, Examiner] = {}
        calibration: dict[str, Calibration] = {}
        for name, task in self.run.tasks.items():
            examiner = self._try_build(f"tasks.{name}", build_examiner, task, self.run)
            if examiner is not None and task.kind != "function" and self.run.model.kind in LOADERS:
                self._try_build(f"tasks.{name}", check_model_kind, task.kind, self.run.model.kind)
            examiners |= {name: examiner} if examiner is not None else {}
            if task.calibration is not None:
                known = self._try_build(f"tasks.{name}.calibration", calibrations.read, task.calibration)
                calibration |= {name: known} if known else {}
        return examiners, calibration

    def _check_parameters(self) -> None:
        """Check that every parameter of the space belongs to a method, and is per model only if it is there."""
        methods = [self.run.method]
        if "method" in self.run.space:
            methods = [str(option) for option in self.run.space["method"].choices or ()]
        known: dict[str, bool] = {}
        for method in methods:
            rule = self._try_build("method", lookup, method)
            if rule is not None:
                for name, parameter in declared(rule).items():
                    known[name] = known.get(name, False) or parameter.per_model
        if not known:
            return
        for name, entry in self.run.space.items():
            if name == LAYERS and methods != ["passthrough"]:
                self.problems.append(f"space.{LAYERS}: takes every layer from one model; use method: passthrough")
            if name in ("method", LAYERS):
                continue
            if name not in known:
                hint = did_you_mean(name, known)
                self.problems.append(f"space.{name}: not a parameter of {', '.join(methods)}{hint}")
            elif entry.per == "model" and not known[name]:
                self.problems.append(f"space.{name}: has one value for all models of a merge; leave out 'per: model'")

    def _check_measures(self, examiners: Mapping[str, Examiner]) -> None:
        """Check that the measures of objectives are reported; functions and the harness are only known when asked."""
        for i, objective in enumerate(self.run.objectives):
            for measure in objective.measures:
                task, _, part = measure.partition(".")
                known = getattr(examiners.get(task), "measures", None)
                if part and known is not None and part not in known:
                    hint = did_you_mean(measure, [task, *(f"{task}.{each}" for each in known)])
                    self.problems.append(f"objectives[{i}]: nothing measures {measure!r}{hint}")


def build_evaluator(run: RunFile, space: Space, examiners: Mapping[str, Examiner]) -> MergedModels | ServedAdapters:
    """Return the evaluator: merges in a module in memory, or merges of adapters on a server."""
    model = run.model
    if model.kind == SERVER:
        return serve_adapters(run, examiners)
    if ":" in model.kind:
        import_function(model.kind)
    elif model.kind not in LOADERS:
        raise InputError(f"unknown {model.kind!r}{did_you_mean(model.kind, [*LOADERS, SERVER])}")
    path = model.path or run.original
    quantize = None if model.quantize is None else Quantization(model.quantize, model.device)
    loader = Loader(model.kind, path, model.device if quantize is None else "cpu", model.dtype)
    return MergedModels(loader, run.template, space, examiners, run.answers, quantize)


def count_layers(run: RunFile) -> int:
    """Return the number of layers of the base, or of the first model."""
    stack = find_layout(open_checkpoint(run.original).names()).main
    if stack is None:
        raise InputError(f"{run.original}: has no stack of layers")
    return stack.layers
