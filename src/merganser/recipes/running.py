"""`merge` for weights in memory and `run` for recipes, with the same plan and arithmetic."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from merganser.checkpoints.base import Checkpoint
from merganser.checkpoints.digests import check_digest
from merganser.checkpoints.dtypes import dtype_name
from merganser.checkpoints.memory import StateDict
from merganser.checkpoints.opening import Reference
from merganser.checkpoints.opening import open as open_checkpoint
from merganser.engine.merge import Merge
from merganser.engine.workers import DEFAULT_MEMORY, check_workers
from merganser.errors import InputError
from merganser.lazy import torch
from merganser.methods.registry import lookup
from merganser.methods.registry import parameters as method_parameters
from merganser.recipes.loading import load, resolve_document, to_yaml_values
from merganser.recipes.planning import prepare
from merganser.recipes.schema import Recipe
from merganser.recipes.settings import matches

if TYPE_CHECKING:
    from torch import Tensor

    from merganser.engine.execute import Progress


def merge(
    models: Sequence[Reference] | Mapping[str, Reference],
    method: str = "linear",
    base: Reference | None = None,
    *,
    seed: int = 0,
    dtype: str | torch.dtype | None = None,
    overrides: Sequence[Mapping[str, Any]] = (),
    output: Mapping[str, Any] | None = None,
    statistics: Mapping[str, Sequence[Any] | Mapping[str, Any]] | None = None,
    workers: int | None = None,
    memory: int = DEFAULT_MEMORY,
    device: str = "cpu",
    allow_nan: bool = False,
    **parameters: Any,
) -> dict[str, Tensor]:
    """Merge checkpoints, state dicts or modules into a new state dict. The inputs are not changed.

    Args:
        models: The models to merge: paths, hub ids, checkpoints, state dicts or modules. A mapping gives them labels,
            which also seed the random numbers of each model.
        method: The merging method; `merganser methods` lists them.
        base: The model they were fine-tuned from, for methods on task vectors. A base that is also among the models
            is not counted twice.
        seed: The seed of random methods.
        dtype: The dtype of the result; by default that of the base, or of the first model.
        overrides: Other methods or parameters for tensors by name, as in a recipe.
        output: Options of the output, as in a recipe.
        statistics: Side tensors by kind, one for each model, for methods that need them: `{"fisher": [...]}` of paths,
            state dicts or what `mg.tuning.diagonal_fisher` returns.
        workers: The number of threads; by default one per core.
        memory: The memory limit in bytes.
        device: The torch device to compute on.
        allow_nan: Accept values that are not finite.
        **parameters: The method's parameters. A per-model parameter takes a number, a list with one per model, or a
            mapping from their labels.

    Returns:
        The merged tensors by name.

    Raises:
        MerganserError: If the models do not fit together, or a name or value is wrong; raised before any work.

    Warns:
        UserWarning: For every note that `merganser plan` would print, such as a pattern that matches no tensor.

    Example:
        >>> merged = mg.merge([math, code], method="ties", base=base, density=0.2, weight=[0.6, 0.4])
    """
    check_workers(workers, device)
    labelled = _label_models(models)
    opened = {label: open_labelled(reference, label) for label, reference in labelled.items()}
    shared, own = _split_parameters(method, to_yaml_values(parameters), opened)
    entries = [{"path": label, **{name: own[name][i] for name in own}} for i, label in enumerate(opened)]
    for entry, sides in zip(entries, _split_statistics(statistics or {}, list(opened)), strict=True):
        for kind, side in sides.items():
            entry[kind] = _extend_label(f"{kind} of {entry['path']}", "statistics", opened)
            opened[entry[kind]] = open_labelled(getattr(side, "tensors", side), entry[kind])
    document: dict[str, Any] = {
        "method": method,
        "models": entries,
        "parameters": shared,
        "overrides": overrides,
        "output": output if dtype is None else {**(output or {}), "dtype": dtype_name(dtype)},
        "seed": seed,
    }
    if base is not None:
        among = next((label for label, model in labelled.items() if _is_same(model, base)), None)
        document["base"] = key = among or _extend_label(_name_of(base) or "base", "base", opened)
        if not among:
            opened[key] = open_labelled(base, key)
    prepared = prepare(load(document, held=opened), open=opened.__getitem__)
    for note in prepared.plan.notes:
        warnings.warn(note, stacklevel=2)
    from merganser.engine.compute import Arithmetic
    from merganser.engine.execute import execute
    from merganser.engine.sinks import DictSink

    sink = DictSink(prepared.plan)
    execute(prepared, sink, workers=workers, memory=memory, settings=Arithmetic(device, allow_nan))
    return sink.result()


def run(
    recipe: str | os.PathLike[str] | Mapping[str, Any] | Recipe,
    out: str | os.PathLike[str],
    *,
    seed: int | None = None,
    dtype: str | torch.dtype | None = None,
    shard_size: int | str | None = None,
    quantize: str | None = None,
    resume: bool = False,
    overwrite: bool = False,
    workers: int | None = None,
    memory: int = DEFAULT_MEMORY,
    device: str = "cpu",
    allow_nan: bool = False,
    ray: str | None = None,
    processes: bool = False,
    changes: bool = True,
    digest: str | None = None,
    on_merge: Callable[[Merge], None] = lambda merge: None,
    on_progress: Callable[[Progress], None] | None = None,
    on_complete: Callable[[Path], None] = lambda out: None,
) -> Path:
    """Merge according to a recipe and write a checkpoint directory, like `merganser merge`.

    Args:
        recipe: The path of a recipe, its text, a mapping, or a loaded recipe.
        out: The directory to write; or `OUT.safetensors`, one file with the weights alone.
        seed: The seed; overrides the recipe's.
        dtype: The dtype of the output; overrides the recipe's.
        shard_size: The largest file of the output, in bytes or as `"5GB"`; overrides the recipe's.
        quantize: The format to quantise to, "fp8" or a GGUF type; overrides the recipe's.
        resume: Continue a merge that was interrupted.
        overwrite: Replace `out`, or an unfinished merge.
        workers: The number of workers; by default one per core.
        memory: The memory limit in bytes.
        device: The torch device to compute on.
        allow_nan: Accept values that are not finite.
        ray: The address of a Ray cluster to compute on (`"local"` starts one on this machine). Sources and `out` must
            be on a file system that all its nodes share.
        processes: Use forked processes as workers, which are faster than threads. Only for programs without threads of
            their own.
        changes: Record what the merge changes, tensor by tensor, in `merganser-changes.json` beside the weights: norms,
            distances, shares of the parents, conflicts of sign. `merganser report` shows it.
        digest: The digest of tensors in `merganser.lock.json`: `"sha256"`, which proves their content, or `"xxh3_128"`,
            which is several times faster and detects every accident, but not a forgery. By default SHA-256 for merges
            that read and write less than a gigabyte, xxh3 for larger ones.
        on_merge: Called with the merge before any work.
        on_progress: Called whenever a tensor is finished.
        on_complete: Called, with nothing else done, if `resume` finds that `out` was already made by this recipe from
            these models.

    Returns:
        The directory.

    Raises:
        MerganserError: If the recipe, the models or `out` are invalid, before any work; or if the work fails.

    Example:
        >>> mg.run("recipe.yml", "out/")
    """
    check_workers(workers, device)
    if digest is not None:
        check_digest(digest)
    loaded = recipe if isinstance(recipe, Recipe) else load(recipe)
    loaded = loaded.with_options(seed=seed, dtype=dtype, shard_size=shard_size, quantize=quantize)
    if ray is not None and loaded.output.quantize is not None:
        raise InputError(
            "output.quantize: a merge on Ray cannot be quantised; quantise its output with a second recipe"
        )
    prepared = prepare(loaded)
    on_merge(prepared)
    # A wrong recipe is refused before the engine is imported.
    from merganser.engine.compute import Arithmetic
    from merganser.engine.export import Execution, write_merge
    from merganser.engine.origin import choose_digest
    from merganser.engine.writer import Destination

    settings = Arithmetic(device, allow_nan, changes, choose_digest(prepared) if digest is None else digest)
    given = [] if isinstance(recipe, (Mapping, Recipe)) or not os.path.exists(recipe) else [Path(recipe)]
    return write_merge(
        prepared,
        Destination(Path(os.path.expanduser(out)), resume, overwrite, on_complete),
        Execution(settings, workers, memory, ray, processes, on_progress),
        inputs=[*given, *_find_recipe_files(loaded)],
        recipe=resolve_document(loaded),
    )


def check_several(models: object) -> None:
    """Refuse a single model in place of a list: a path would pass as a list of its letters."""
    if isinstance(models, (str, os.PathLike, torch.nn.Module, Checkpoint)) or not isinstance(models, Iterable):
        raise InputError(f"models: expected a list or a mapping of models, got a single {type(models).__name__}")


def _find_recipe_files(recipe: Recipe) -> Iterator[Path]:
    """Yield the directories of the recipes inside a recipe."""
    for entry in recipe.entries():
        if entry.recipe is not None:
            yield from _find_recipe_files(entry.recipe)
            if entry.recipe.root is not None:
                yield entry.recipe.root / "recipe"


def _label_models(models: Sequence[Reference] | Mapping[str, Reference]) -> Mapping[str, Reference]:
    """Return the models by their given labels, by their paths or names, or by position if those are not unique."""
    if isinstance(models, Mapping):
        return models
    check_several(models)
    listed = list(models)
    names = [_name_of(model) for model in listed]
    labelled = {
        name if name and (_path_of(model) or names.count(name) == 1) else f"models[{i}]": model
        for i, (name, model) in enumerate(zip(names, listed, strict=True))
    }
    if len(labelled) < len(listed):
        raise InputError("two models have the same path; give them labels with a mapping")
    return labelled


def _path_of(reference: Reference) -> str | None:
    return os.fspath(reference) if isinstance(reference, (str, os.PathLike)) else None


def _name_of(reference: Reference) -> str | None:
    return reference.label if isinstance(reference, Checkpoint) else _path_of(reference)


def _is_same(one: Reference, other: Reference) -> bool:
    """Return whether two references are one object, or one place after resolving links."""
    a, b = _path_of(one), _path_of(other)
    if a is None or b is None:
        return one is other
    return a == b or (os.path.exists(a) and os.path.exists(b) and os.path.samefile(a, b))


def _extend_label(label: str, role: str, taken: Collection[str]) -> str:
    """Return the label, extended if it is already taken."""
    while label in taken:
        label = f"{role} {label}"
    return label


def open_labelled(reference: Reference, label: str) -> Checkpoint:
    """Open a model; weights in memory get the label they have in a recipe."""
    checkpoint = open_checkpoint(reference)
    if isinstance(checkpoint, StateDict):
        checkpoint = copy.copy(checkpoint)  # the caller's own keeps its label
        checkpoint.label = label
    return checkpoint


def _split_statistics(
    statistics: Mapping[str, Sequence[Any] | Mapping[str, Any]], labels: Sequence[str]
) -> list[dict[str, Reference]]:
    """Return the statistics of each model by kind, from lists in model order or mappings by label."""
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


def _split_parameters(
    method: str, parameters: Mapping[str, Any], models: Mapping[str, Checkpoint]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the parameters that all models share, and those given as one value per model, in a list or by label."""
    labels = list(models)
    known = method_parameters(lookup(method)) if parameters else {}  # without any, the recipe reports the method
    own: dict[str, Any] = {}
    for name, value in parameters.items():
        if name not in known or not known[name].per_model:
            continue
        if isinstance(value, Mapping) and (not value.keys().isdisjoint(labels) or not _match_any(value, models)):
            if value.keys() != set(labels):
                raise InputError(f"{name}: expected a value for each of {labels}, got values for {list(value)}")
            value = [value[label] for label in labels]
        if isinstance(value, list):
            if len(value) != len(labels):
                raise InputError(f"{name}: {len(value)} values for {len(labels)} models")
            own[name] = value
    return {name: value for name, value in parameters.items() if name not in own}, own


def _match_any(globs: Iterable[str], models: Mapping[str, Checkpoint]) -> bool:
    """Return whether any glob matches a tensor of the models."""
    return any(matches(glob, name) for glob in globs for model in models.values() for name in model)
