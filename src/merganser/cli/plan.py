"""`merganser plan`: show what a recipe does before anything is merged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from merganser.cli.limits import memory_limit
from merganser.cli.options import Device, Dtype, Json, Memory, Quantize, Recipe, RecipeSeed, ShardSize, Tensors, Workers
from merganser.cli.output import emit, say, wrap, write
from merganser.units import show_size

if TYPE_CHECKING:
    from pathlib import Path

    from merganser.engine.merge import Merge


def command(
    recipe: Recipe,
    tensors: Tensors = False,
    native: Annotated[
        bool, typer.Option("--native", help="Print the recipe in native keys, as YAML, and stop.")
    ] = False,
    seed: RecipeSeed = None,
    dtype: Dtype = None,
    shard_size: ShardSize = None,
    quantize: Quantize = None,
    memory: Memory = None,
    workers: Workers = None,
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Check a recipe and show what the merge would do.

    Reads configs, headers and a few thousand numbers of each model, to find models that do not share the base.

    With --tensors, also prints every method with its sources and effective parameters, above the tensors that it
    merges; tensors that differ only in the numbers of their names share a line. With --native, only prints the
    recipe (in mergekit's format, or with an expression) in native keys; save it beside RECIPE, since paths are relative
    to it.
    """
    if native:
        show_native(recipe, as_json)
        return
    from merganser import recipes
    from merganser.checkpoints.opening import open_headers
    from merganser.checkpoints.sidecars import prepare_sidecars
    from merganser.engine.workers import check_workers
    from merganser.report.plans import describe_tensors, tensor_list

    memory_limit(memory)
    check_workers(workers, device)
    given = recipes.load(recipe).with_options(seed=seed, dtype=dtype, shard_size=shard_size, quantize=quantize)
    merge = recipes.prepare(given, open_headers)
    prepare_sidecars(merge.plan.sidecars, merge.sources)  # reports their problems
    rows = describe_tensors(merge.quantises or merge) if tensors else None
    show_merge(merge, memory, workers, as_json, rows)
    if rows is not None and not as_json:
        say(f"\n{tensor_list(rows)}")


def show_native(recipe: Path, as_json: bool) -> None:
    """Print a recipe as a native document."""
    from merganser.plain import to_yaml
    from merganser.recipes.loading import load

    document = load(recipe).document
    if as_json:
        emit(document)
    else:
        write(to_yaml(document, compact=True))


def show_merge(
    merge: Merge, memory: str | None, workers: int | None, as_json: bool, outputs: list[dict[str, Any]] | None = None
) -> None:
    """Print what a merge reads, writes and needs; raise if it needs more memory than the user allows."""
    from merganser.errors import InputError
    from merganser.report.plans import facts, summarise

    limit = memory_limit(memory)
    summary = summarise(merge, limit, workers)
    if memory is not None and summary["memory_bound"] > limit:
        bound = show_size(summary["memory_bound"])
        raise InputError(f"--memory {show_size(limit)}: one tensor alone needs {bound} with its method")
    if as_json:
        emit(summary if outputs is None else summary | {"outputs": outputs})
        return
    for label, value in facts(summary):
        line = f"{label:<8} {value}"
        say(wrap(line, " " * 9) if label == "note" else line)
