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

A run file is a design with the merge and the models that are asked. `loading` completes it from the files it names; the
study's file contains it completed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from merganser.errors import InputError
from merganser.evolve.design import Design
from merganser.evolve.domains import Values
from merganser.evolve.schema import SettingError, StudyRecord, from_document, to_document
from merganser.evolve.tasks import StudyTask
from merganser.recipes import documents
from merganser.recipes.references import locate

#: The `kind` of a model that a server asks.
SERVER = "server"
#: Keys of tasks that are read from their questions.
READ = ("items", "strata", "test_items")


@dataclass(frozen=True)
class ModelSettings(StudyRecord):
    """The module that candidates are merged into.

    Args:
        kind: A kind of `transformers` model, `package.module:function` that builds a module, or `server`.
        path: The model with the architecture; by default the base, or the first model. The address of a server.
        tokenizer: The tokenizer; by default that of `path`, the base or the first model.
        device: The device that models are asked on.
        dtype: The dtype that they compute in; by default the checkpoint's.
        quantize: Ask candidates in `int8` or 4-bit `nf4`. They are merged in memory, and the quantised copy is on the
            device. The test is in full precision, and the difference is measured on the endpoints.
    """

    kind: str = "causal-lm"
    path: str | None = None
    tokenizer: str | None = None
    device: str = "cpu"
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    quantize: Literal["int8", "nf4"] | None = None

    def __post_init__(self) -> None:
        if self.kind == SERVER and self.quantize is not None:
            raise SettingError("quantize: a server has its own precision; leave it out")


@dataclass(frozen=True, kw_only=True)
class RunFile(Design):
    """A design whose candidates are merges of checkpoints.

    Args:
        method: The merging method, unless the space searches it.
        parameters: Its fixed parameters.
        overrides: Overrides of the recipe.
        output: The output section of the recipe.
        model: The module that is asked.
        answers: A file of the endpoints' answers, shared between studies.
        workers: The number of processes.
    """

    method: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    overrides: tuple[Mapping[str, Any], ...] = ()
    output: Mapping[str, Any] = field(default_factory=dict)
    model: ModelSettings = field(default_factory=ModelSettings)
    answers: str | None = None
    workers: int = 1

    def __post_init__(self) -> None:
        if not self.models:
            raise SettingError("models: name at least one")
        if self.workers < 1:
            raise SettingError(f"workers: {self.workers}; at least 1")
        super().__post_init__()

    def _check_completed(self) -> None:
        counted = all(task.items for task in self.tasks.values())
        if counted and (self.depth or not any(parameter.needs_depth for parameter in self.space.values())):
            super()._check_completed()

    @property
    def original(self) -> str:
        """Return the base, or without one the first model: candidates have its architecture and its tokenizer."""
        return self.base or next(iter(self.models.values()))

    @property
    def template(self) -> dict[str, Any]:
        """Return the native recipe without the values under search, with the models in their order."""
        document: dict[str, Any] = {"method": self.method}
        if self.base is not None:
            document["base"] = self.base
        document["models"] = [{"path": path} for path in self.models.values()]
        document |= {key: value for key in ("parameters", "output") if (value := dict(getattr(self, key)))}
        if self.overrides:
            document["overrides"] = [dict(each) for each in self.overrides]
        return document | {"seed": self.search.seed}

    def recipe(self, values: Values) -> dict[str, Any]:
        """Return the recipe of a candidate."""
        return self.search_space.recipe(self.template, values)

    def difference(self, other: RunFile) -> str:
        """Return the first key that makes this another study, "" if there is none. The order of models counts.

        What is read from the questions comes last: it differs because of something else.
        """
        one, two = (
            to_document(replace(run, workers=1, answers=None, model=replace(run.model, device="cpu")))
            for run in (self, other)
        )
        return _find_difference(one, two, READ) or _find_difference(one, two)


def _find_difference(one: Any, two: Any, ignored: Sequence[str] = (), where: str = "") -> str:
    """Return the place of the first difference of two documents, in the order of the first; "" if they are equal."""
    if not isinstance(one, dict) or not isinstance(two, dict):
        return where if repr(one) != repr(two) else ""
    for key in (each for each in {**one, **two} if each not in ignored):
        place = f"{where}.{key}".lstrip(".")
        if found := _find_difference(one[key], two[key], ignored, place) if key in one and key in two else place:
            return found
    return f"the order of {where or 'keys'}" if list(one) != list(two) else ""


def read_run_file(text: str, root: str | Path = ".", source: str = "run file") -> RunFile:
    """Parse a run file and check what it says by itself; paths that exist below `root` become absolute.

    Raises:
        InputError: If it is not one mapping with the keys of a run file; all problems at once.
    """
    found = [document for document in documents.parse(text, source) if document is not None]
    if len(found) != 1 or not isinstance(found[0], dict):
        raise InputError(f"{source}: expected one mapping with models, method, space, tasks and objectives")
    try:
        return _resolve_paths(from_document(RunFile, found[0]), Path(root).resolve())
    except InputError as error:
        raise summarize_problems(str(error).split("\n"), source) from None


def summarize_problems(lines: list[str], source: str) -> InputError:
    """Return one error for all problems of a file."""
    distinct = list(dict.fromkeys(lines))
    if len(distinct) == 1:
        return InputError(f"{source}: {distinct[0]}")
    return InputError(f"{source}: {len(distinct)} problems\n" + "\n".join(f"  {line}" for line in distinct))


def _resolve_paths(run: RunFile, root: Path) -> RunFile:
    """Resolve paths beside the run file if they exist there; others are unchanged (working directory, or a hub id)."""

    def place(path: str) -> str:
        name, mark, part = path.partition("#")  # a part of a calibration file
        if any(mark in name for mark in "*?[") and not Path(name).is_absolute():  # calibrations of several models
            return str(root / name) + mark + part
        return locate(name, root) + mark + part

    def placed(section: Any, *names: str) -> dict[str, Any]:
        return {name: place(path) for name in names if isinstance(path := getattr(section, name), str)}

    def task(entry: StudyTask) -> StudyTask:
        named = {name: entry.options.get(name) for name in ("include", "examples")}
        here = {name: place(path) for name, path in named.items() if isinstance(path, str)}
        return replace(entry, **placed(entry, "data", "calibration", "test"), options={**entry.options, **here})

    return replace(
        run,
        **placed(run, "base"),
        models={label: place(path) for label, path in run.models.items()},
        tasks={name: task(entry) for name, entry in run.tasks.items()},
        model=replace(run.model, **placed(run.model, "path", "tokenizer")),
        answers=None if run.answers is None else str(root / run.answers),
    )
