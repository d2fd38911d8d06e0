"""The schema of a run file, and messages for files that do not match it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from merganser.errors import did_you_mean


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class SpaceEntry(_Section):
    low: float | None = None
    high: float | None = None
    integer: bool = False
    log: bool = False
    choices: list[bool | int | float | str] | None = None
    per: Literal["model", "merge"] = "merge"
    points: int | Literal["layers"] = 1
    split: bool = False
    reach: int | None = None
    groups: dict[str, str] = Field(default_factory=dict)


class TaskEntry(_Section):
    kind: str
    data: str | None = None
    task: str | None = None
    function: str | None = None
    items: int | None = None
    subset: int | None = None
    extractor: str | None = None
    estimator: str | None = None
    c: float | str | None = None
    dimensions: int | None = None
    test: float | str = 0.2
    strata: str | None = None
    group: str | None = None
    calibration: str | None = None
    options: dict[str, Any] = Field(default_factory=dict)


class ObjectiveEntry(_Section):
    name: str
    measures: dict[str, float]
    maximize: bool | None = None


class SearchEntry(_Section):
    algorithm: str = "ga"
    population: int = 25
    generations: int = 7
    seed: int = 0
    split_seed: int = 0
    stability: int = 0
    rerank: int = 3
    race: int = 0
    reference_points: list[list[float]] | None = None


class ModelEntry(_Section):
    kind: str = "causal-lm"
    path: str | None = None
    tokenizer: str | None = None
    device: str = "cpu"
    dtype: Literal["float32", "bfloat16", "float16"] | None = None


class RunFile(_Section):
    models: dict[str, str]
    method: str
    space: dict[str, SpaceEntry]
    tasks: dict[str, TaskEntry]
    objectives: list[str | ObjectiveEntry]
    base: str | None = None
    parameters: dict[str, Any] = Field(default_factory=dict)
    overrides: list[dict[str, Any]] = Field(default_factory=list)
    output: dict[str, Any] = Field(default_factory=dict)
    constraints: list[str] = Field(default_factory=list)
    search: SearchEntry = Field(default_factory=SearchEntry)
    model: ModelEntry = Field(default_factory=ModelEntry)
    answers: str | None = None
    workers: int = 1

    def decisive(self) -> str:
        """Return everything that results depend on, as text; it is equal for run files of one study."""
        return self.model_dump_json(exclude={"workers": True, "answers": True, "model": {"device"}})


def problems(error: ValidationError) -> list[str]:
    """Translate Pydantic's errors into our messages."""
    return list(dict.fromkeys(_message(each) for each in error.errors()))


_SECTIONS: Mapping[str, type[BaseModel]] = {
    "space": SpaceEntry,
    "tasks": TaskEntry,
    "search": SearchEntry,
    "model": ModelEntry,
    "objectives": ObjectiveEntry,
}


def _message(error: Any) -> str:
    """Return the place, the problem, and the nearest known word."""
    location = list(error["loc"])
    # If several types are allowed, pydantic appends the one it tried.
    while len(location) > 1 and location[-1] in ("str", "float", "int", "bool"):
        location.pop()
    location = [part for part in location if part not in ("str", "ObjectiveEntry")]
    where = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in location).lstrip(".")
    if error["type"] == "extra_forbidden":
        section = _SECTIONS.get(str(location[0]), RunFile) if len(location) > 1 else RunFile
        parent, _, word = where.rpartition(".")
        prefix = f"{parent}: " if parent else ""
        return f"{prefix}unknown key {word!r}{did_you_mean(word, section.model_fields)}"
    if error["type"] == "missing":
        parent, _, word = where.rpartition(".")
        return f"{parent}: {word!r} is missing" if parent else f"{word!r} is missing"
    if error["type"] == "literal_error":
        return f"{where}: expected {error['ctx']['expected']}, got {error['input']!r}"
    shown = repr(error["input"])
    return f"{where}: {error['msg'].removeprefix('Input ').replace('should be', 'must be')}, got {shown[:60]}"
