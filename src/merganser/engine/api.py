"""`merge` for weights in memory, `run` for recipes: the same plan, the same arithmetic."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from merganser import recipes
from merganser.checkpoints.base import Checkpoint
from merganser.checkpoints.memory import StateDict
from merganser.checkpoints.opening import Reference
from merganser.checkpoints.opening import open as open_checkpoint
from merganser.checkpoints.sidecars import write_sidecars
from merganser.engine.compute import Settings
from merganser.engine.execute import DEFAULT_MEMORY, Progress, execute
from merganser.engine.processes import execute_in_processes
from merganser.engine.sinks import DictSink
from merganser.engine.view import open_sources
from merganser.engine.writer import CheckpointWriter
from merganser.errors import InputError
from merganser.methods.base import lookup
from merganser.methods.base import parameters as method_parameters
from merganser.recipes.plan import Plan
from merganser.recipes.schema import Recipe


def merge(
    models: Sequence[Reference] | Mapping[str, Reference],
    method: str = "linear",
    base: Reference | None = None,
    *,
    seed: int = 0,
    dtype: str | None = None,
    overrides: Sequence[Mapping[str, Any]] = (),
    statistics: Mapping[str, Sequence[Any] | Mapping[str, Any]] | None = None,
    workers: int | None = None,
    memory: int = DEFAULT_MEMORY,
    device: str = "cpu",
    allow_nan: bool = False,
    **parameters: Any,
) -> dict[str, Tensor]:
    """Merge checkpoints, state dicts or modules into a new state dict; the inputs are left as they are.

    `parameters` are the method's (`merganser methods NAME` lists them); one that is per model takes a number or a
    list with one number for each model. A mapping of models gives them labels, which key the randomness of
    methods that draw. `statistics` are what methods that are informed by data want, by kind, one for each model:
    `{"fisher": [...]}` of paths, state dicts or `tuning.Statistics`.

    >>> merged = mg.merge([math, code], method="ties", base=base, density=0.2, weight=[0.6, 0.4])
    """
    labelled = models if isinstance(models, Mapping) else {_label(m, i): m for i, m in enumerate(models)}
    if len(labelled) < len(models):
        raise InputError("two models have the same path; give them labels with a mapping")
    opened = {label: _named(open_checkpoint(reference), label) for label, reference in labelled.items()}
    entries = _entries(method, list(opened), parameters)
    for entry, sides in zip(entries, _sides(statistics or {}, list(opened)), strict=True):
        for kind, side in sides.items():
            entry[kind] = f"{kind} of {entry['path']}"
            opened[entry[kind]] = _named(open_checkpoint(getattr(side, "tensors", side)), entry[kind])
    document: dict[str, Any] = {
        "method": method,
        "models": entries,
        "parameters": {name: value for name, value in parameters.items() if not _spread(method, name, value)},
        "overrides": [dict(override) for override in overrides],
        "seed": seed,
    }
    if dtype is not None:
        document["output"] = {"dtype": dtype}
    if base is not None:
        document["base"] = _label(base, "base")
        opened.setdefault(document["base"], _named(open_checkpoint(base), document["base"]))
    plan = recipes.plan(recipes.load(document), open=opened.__getitem__)
    sources = [opened[str(model.path)] for model in plan.models]
    sink = DictSink(plan)
    execute(plan, sources, sink, workers=workers, memory=memory, settings=Settings(device, allow_nan))
    return sink.result()


def run(
    recipe: str | os.PathLike[str] | Mapping[str, Any] | Recipe,
    out: str | os.PathLike[str],
    *,
    resume: bool = False,
    overwrite: bool = False,
    workers: int | None = None,
    memory: int = DEFAULT_MEMORY,
    device: str = "cpu",
    allow_nan: bool = False,
    ray: str | None = None,
    processes: bool = False,
    on_plan: Callable[[Plan, Sequence[Checkpoint]], None] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> Path:
    """Merge as a recipe says and write the checkpoint directory `out`; what `merganser merge` does.

    `processes` makes workers of forked processes, which are faster than threads: for programs that have no threads of
    their own to fear for. `ray` names a cluster (`"local"` starts one on this machine) to compute on; sources and `out`
    must be on a file system all its nodes share.
    """
    opened = functools.cache(open_checkpoint)  # planning and merging look at the same headers
    plan = recipes.plan(recipe if isinstance(recipe, Recipe) else recipes.load(recipe), opened)
    sources = open_sources(plan, opened)
    if on_plan is not None:
        on_plan(plan, sources)
    settings = Settings(device, allow_nan)
    fingerprint = plan.fingerprint([source.fingerprint() for source in sources])
    writer = CheckpointWriter(Path(out), plan, fingerprint, resume=resume, overwrite=overwrite)
    try:
        if writer.published:
            pass
        elif ray is not None:
            from merganser.engine.ray_executor import execute_on_ray

            execute_on_ray(plan, writer, ray, workers=workers, settings=settings, on_progress=on_progress)
        else:
            compute = execute_in_processes if processes else execute
            compute(plan, sources, writer, workers=workers, memory=memory, settings=settings, on_progress=on_progress)
        return writer.publish(lambda directory: write_sidecars(plan, sources, directory))
    except BaseException:
        writer.abandon()
        raise


def _label(reference: Reference, position: object) -> str:
    if isinstance(reference, Checkpoint):
        return reference.label
    return os.fspath(reference) if isinstance(reference, (str, os.PathLike)) else f"models[{position}]"


def _named(checkpoint: Checkpoint, label: str) -> Checkpoint:
    if isinstance(checkpoint, StateDict):
        checkpoint.label = label
    return checkpoint


def _sides(
    statistics: Mapping[str, Sequence[Any] | Mapping[str, Any]], labels: Sequence[str]
) -> list[dict[str, Reference]]:
    """For each model its statistics by kind, from lists in the order of the models or mappings by their labels."""
    found: list[dict[str, Reference]] = [{} for _ in labels]
    for kind, given in statistics.items():
        if isinstance(given, Mapping) and set(given) != set(labels):
            raise InputError(f"statistics[{kind!r}]: expected one for each of {list(labels)}, got {list(given)}")
        if len(given) != len(labels):
            raise InputError(f"statistics[{kind!r}]: {len(given)} values for {len(labels)} models")
        each = [given[label] for label in labels] if isinstance(given, Mapping) else given
        for sides, side in zip(found, each, strict=True):
            sides[kind] = side
    return found


def _spread(method: str, name: str, value: Any) -> bool:
    known = method_parameters(lookup(method))
    return isinstance(value, (list, tuple)) and name in known and known[name].per_model


def _entries(method: str, labels: Sequence[str], parameters: Mapping[str, Any]) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = [{"path": label} for label in labels]
    for name, value in parameters.items():
        if _spread(method, name, value):
            if len(value) != len(labels):
                raise InputError(f"{name}: {len(value)} values for {len(labels)} models")
            for entry, each in zip(entries, value, strict=True):
                entry[name] = each
    return entries
