"""The run file: models, search space, tasks, objectives and search of a study, as a user writes them.

    base: ./base
    models: {math: ./math, code: ./code}
    method: ties
    space:
      weight: {low: 0, high: 1.5, per: model, points: 3}
      density: {low: 0.1, high: 1.0, groups: {mlp: "*.mlp.*", rest: "*"}}
    constraints: ["weight.math[0] + weight.code[0] <= 2"]
    tasks:
      quiz: {kind: multiple-choice, data: ./quiz.jsonl, subset: 30, estimator: gmp-irt, c: adaptive}
      arc: {kind: lm-eval, task: arc_easy, subset: 30, options: {metric: acc_norm, shots: 5}}
    objectives: [{name: both, measures: {quiz: 0.5, arc: 0.5}}]
    search: {algorithm: ga, population: 25, generations: 7, seed: 0}
    model: {kind: causal-lm}

All problems are reported at once, before any work. Relative paths are resolved beside the file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from merganser.checkpoints.opening import open as open_checkpoint
from merganser.errors import InputError, MerganserError, did_you_mean, reading
from merganser.evaluate.harness import HARNESS
from merganser.evaluate.loaders import LOADERS, Loader
from merganser.evaluate.questions import Examiner
from merganser.evaluate.references import imported
from merganser.evolve import calibrations, liveness
from merganser.evolve.design import Design, Objective, StudyTask
from merganser.evolve.directions import choose_direction
from merganser.evolve.fitness import BASE, MergedModels
from merganser.evolve.layering import LAYERS, layer_options
from merganser.evolve.preparation import Calibration, cautions, check_items
from merganser.evolve.runschema import ObjectiveEntry, RunFile, SpaceEntry, TaskEntry, problems
from merganser.evolve.runtasks import build_examiner, build_task, choose_test_items, directions_of
from merganser.evolve.space import Choices, Range, SearchParameter, Space
from merganser.evolve.starts import starting_values
from merganser.methods.registry import lookup
from merganser.methods.registry import parameters as declared
from merganser.recipes import documents
from merganser.recipes.layers import layout
from merganser.recipes.references import locate

T = TypeVar("T")
Section = TypeVar("Section", bound=BaseModel)


@dataclass(frozen=True)
class LoadedRun:
    """A validated and resolved run file, for `Study.run`."""

    design: Design
    evaluate: MergedModels
    calibration: Mapping[str, Calibration]
    workers: int
    file: RunFile
    text: str
    root: str
    source: str = "run file"
    cautions: tuple[str, ...] = ()
    """Warnings to show before the study runs."""


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
    return _Resolver(read(text, root, source), source, text, str(root)).resolve()


def read(text: str, root: str | Path = ".", source: str = "run file") -> RunFile:
    """Parse a run file and check only its shape; paths that exist below `root` become absolute."""
    found = [document for document in documents.parse(text, source) if document is not None]
    if len(found) != 1 or not isinstance(found[0], dict):
        raise InputError(f"{source}: expected one mapping with models, method, space, tasks and objectives")
    try:
        run = RunFile.model_validate(found[0])
    except ValidationError as error:
        raise _error(problems(error), source) from None
    return _placed(run, Path(root))


def template(run: RunFile) -> dict[str, Any]:
    """Return the native recipe without the values under search, with models in the order of the run file."""
    document: dict[str, Any] = {"method": run.method}
    if run.base is not None:
        document["base"] = run.base
    document["models"] = [{"path": path} for path in run.models.values()]
    for key in ("parameters", "overrides", "output"):
        if value := getattr(run, key):
            document[key] = value
    return document | {"seed": run.search.seed}


def _placed(run: RunFile, root: Path) -> RunFile:
    """Resolve paths beside the run file if they exist there; others are unchanged (working directory, or a hub id)."""

    def place(path: str) -> str:
        name, mark, part = path.partition("#")  # a part of a calibration file
        if any(mark in name for mark in "*?[") and not Path(name).is_absolute():  # calibrations of several models
            return str(root.resolve() / name) + mark + part
        return locate(name, root.resolve()) + mark + part

    def placed(section: Section, *names: str) -> Section:
        found = {name: path for name in names if (path := getattr(section, name)) is not None}
        return section.model_copy(update={name: place(path) for name, path in found.items()})

    def task(entry: TaskEntry) -> TaskEntry:
        paths = {"include", "examples"} if entry.kind == HARNESS else {"examples"}
        here = {name: place(path) for name, path in entry.options.items() if name in paths and isinstance(path, str)}
        options = {**entry.options, **here}
        files = ("data", "calibration", "test") if isinstance(entry.test, str) else ("data", "calibration")
        return placed(entry, *files).model_copy(update={"options": options})

    return placed(run, "base").model_copy(
        update={
            "models": {label: place(path) for label, path in run.models.items()},
            "tasks": {name: task(entry) for name, entry in run.tasks.items()},
            "model": placed(run.model, "path", "tokenizer"),
        }
    )


class _Resolver:
    """Turns the schema into a design, collecting problems."""

    def __init__(self, run: RunFile, source: str, text: str, root: str) -> None:
        self.run, self.source, self.text, self.root = run, source, text, root
        self.problems: list[str] = []

    def resolve(self) -> LoadedRun:
        run = self.run
        if not run.models:
            self.problems.append("models: name at least one")
        document = template(run)
        space = self.space()
        self.finish()
        assert space is not None
        self.attempt("", liveness.check, space, document, list(run.models))
        examiners: dict[str, Examiner] = {}
        tasks: list[StudyTask | None] = []
        calibration: dict[str, Calibration] = {}
        for name, entry in run.tasks.items():
            examiner = self.attempt(f"tasks.{name}", build_examiner, entry, run)
            if examiner is not None:
                examiners[name] = examiner
            if entry.calibration is not None:
                known = self.attempt(f"tasks.{name}.calibration", calibrations.read, entry.calibration)
                calibration |= {name: known} if known else {}
        held = self.attempt("", choose_test_items, run, examiners) or {}
        for name, examiner in examiners.items():
            task = self.attempt("", build_task, name, run.tasks[name], examiner, held.get(name))
            tasks.append(task)
            if task is not None and name in calibration:
                self.attempt(f"tasks.{name}.calibration", check_items, task, calibration[name])
        self.measures(examiners)
        directions = {m: d for name, examiner in examiners.items() for m, d in directions_of(name, examiner).items()}
        objectives = [self.attempt("", _objective, each, directions) for each in run.objectives]
        if run.workers < 1:
            self.problems.append(f"workers: {run.workers}; at least 1")
        self.finish()
        search = run.search.model_dump()
        points = search.pop("reference_points")
        design = self.attempt(
            "",
            lambda: Design(
                space=space,
                tasks=tuple(t for t in tasks if t),
                objectives=tuple(o for o in objectives if o),
                endpoints=tuple(run.models),
                references=self.references(),
                starts=starting_values(space, run.method, list(run.models), run.parameters, run.search.population // 2),
                reference_points=None if points is None else tuple(map(tuple, points)),
                **search,
            ),
        )
        self.finish()
        assert design is not None
        answers = None if run.answers is None else str(Path(self.root).resolve() / run.answers)
        evaluate = MergedModels(self.loader(), document, tuple(run.models), space, examiners, answers)
        warned = [
            caution
            for task in design.tasks
            for caution in cautions(task, len(design.endpoints), calibration.get(task.name, Calibration()))
        ]
        return LoadedRun(
            design, evaluate, calibration, run.workers, run, self.text, self.root, self.source, tuple(warned)
        )

    def references(self) -> tuple[str, ...]:
        """Return the base, unless it is one of the models."""
        named = self.run.base is None or BASE in self.run.models or self.run.base in self.run.models.values()
        return () if named else (BASE,)

    def attempt(self, where: str, build: Callable[..., T], *args: Any) -> T | None:
        """Return the result of `build`; its error becomes a problem."""
        try:
            return build(*args)
        except MerganserError as error:
            message = str(error).removeprefix(f"{where.rpartition('.')[2]}: ")
            self.problems.append(f"{where}: {message}" if where else message)
        return None

    def finish(self) -> None:
        if self.problems:
            raise _error(self.problems, self.source)

    def space(self) -> Space | None:
        parameters = []
        for name, entry in self.run.space.items():
            models = tuple(self.run.models) if entry.per == "model" else ()
            parameter = self.attempt(f"space.{name}", self.parameter, name, entry, models)
            parameters += [parameter] if parameter else []
        self.known_parameters()
        self.finish()
        return self.attempt("space", Space, tuple(parameters), tuple(self.run.constraints))

    def parameter(self, name: str, entry: SpaceEntry, models: tuple[str, ...]) -> SearchParameter:
        if name == LAYERS:
            if entry.reach is None or entry.reach < 0 or entry != SpaceEntry(reach=entry.reach):
                raise InputError("needs reach, how far off a layer may come from, and nothing else")
            return SearchParameter(name, Choices(layer_options(list(self.run.models), entry.reach)), points=self.depth)
        if entry.reach is not None:
            raise InputError(f"reach: only for the parameter {LAYERS!r}")
        points = self.depth if entry.points == "layers" else entry.points
        return SearchParameter(name, _domain(entry), models, entry.groups, points, self.depth if entry.split else 0)

    @cached_property
    def depth(self) -> int:
        """The number of layers of the base, or of the first model."""
        path = self.run.base or next(iter(self.run.models.values()), None)
        stack = layout(open_checkpoint(path).names()).main if path else None
        if stack is None:
            raise InputError(f"{path or 'no model'}: has no stack of layers")
        return stack.layers

    def known_parameters(self) -> None:
        """Check that every parameter of the space belongs to a method, and is per model only if it is there."""
        methods = [self.run.method]
        if "method" in self.run.space:
            methods = [str(option) for option in self.run.space["method"].choices or ()]
        known: dict[str, bool] = {}
        for method in methods:
            rule = self.attempt("method", lookup, method)
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

    def measures(self, examiners: Mapping[str, Examiner]) -> None:
        """Check that the measures of objectives are reported; functions and the harness are only known when asked."""
        for i, objective in enumerate(self.run.objectives):
            for measure in [objective] if isinstance(objective, str) else objective.measures:
                task, _, part = measure.partition(".")
                known = getattr(examiners.get(task), "measures", None)
                if part and known is not None and part not in known:
                    hint = did_you_mean(measure, [task, *(f"{task}.{each}" for each in known)])
                    self.problems.append(f"objectives[{i}]: nothing measures {measure!r}{hint}")

    def loader(self) -> Loader:
        model = self.run.model
        path = model.path or self.run.base or next(iter(self.run.models.values()))
        if ":" not in model.kind and model.kind not in LOADERS:
            self.problems.append(f"model.kind: unknown {model.kind!r}{did_you_mean(model.kind, LOADERS)}")
        elif ":" in model.kind:
            self.attempt("model.kind", imported, model.kind)
        self.finish()
        return Loader(model.kind, path, model.device, model.dtype)


def _domain(entry: SpaceEntry) -> Range | Choices:
    if entry.choices is not None:
        if entry.low is not None or entry.high is not None:
            raise InputError("give either choices, or low and high")
        return Choices(tuple(entry.choices))
    if entry.low is None or entry.high is None:
        raise InputError("needs low and high, or choices")
    return Range(entry.low, entry.high, entry.integer, entry.log)


def _objective(entry: str | ObjectiveEntry, directions: Mapping[str, str]) -> Objective:
    if isinstance(entry, str):
        return Objective.of(entry, choose_direction(entry, {entry: 1.0}, None, directions))
    if not entry.measures:
        raise InputError(f"objective {entry.name!r}: measures: name at least one")
    maximize = choose_direction(entry.name, entry.measures, entry.maximize, directions)
    return Objective(entry.name, entry.measures, maximize)


def _error(found: Iterable[str], source: str) -> InputError:
    lines = list(dict.fromkeys(found))
    if len(lines) == 1:
        return InputError(f"{source}: {lines[0]}")
    return InputError(f"{source}: {len(lines)} problems\n" + "\n".join(f"  {line}" for line in lines))
