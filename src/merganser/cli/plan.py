"""`merganser plan`: show what a recipe does before anything is merged."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from merganser.cli.collapsing import collapse
from merganser.cli.options import Device, Dtype, Json, Memory, Quantize, Recipe, RecipeSeed, ShardSize, Tensors, Workers
from merganser.cli.output import emit, say
from merganser.plain import plain
from merganser.report.tables import Table
from merganser.units import parse_size, show_size

if TYPE_CHECKING:
    from pathlib import Path

    from merganser.engine.merge import Merge
    from merganser.engine.plan import Output, Source


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
    """Check a recipe and its checkpoints and print what a merge would do.

    Reads configs, headers and a few thousand numbers of each model, to find models that do not share the base.

    With --tensors, also prints the method, the sources and the effective parameters of every tensor; on a terminal,
    tensors that differ only in the numbers of their names share a line. With --native, only prints the recipe (in
    mergekit's format, or with an expression) in native keys; save it beside RECIPE, since paths are relative to it.
    """
    if native:
        show_native(recipe, as_json)
        return
    options = {"seed": seed, "dtype": dtype, "shard_size": shard_size, "quantize": quantize}
    show_plan(recipe, options, memory, workers, device, as_json, tensors)


def show_native(recipe: Path, as_json: bool) -> None:
    """Print a recipe as a native document."""
    from merganser.plain import to_yaml
    from merganser.recipes.loading import native_document

    document = native_document(recipe)
    if as_json:
        emit(document)
    else:
        say(to_yaml(document), end="")


def show_plan(
    recipe: Path,
    options: dict[str, Any],
    memory: str | None,
    workers: int | None,
    device: str,
    as_json: bool,
    tensors: bool = False,
) -> None:
    """Print the plan of a recipe, with `options` in place of its own, or raise the first problem."""
    from merganser import recipes
    from merganser.checkpoints.opening import open_headers
    from merganser.checkpoints.sidecars import prepare_sidecars
    from merganser.engine.execute import DEFAULT_MEMORY
    from merganser.recipes.running import check_workers

    limit = parse_size(memory) if memory else DEFAULT_MEMORY
    check_workers(workers, device)
    merge = recipes.prepare(recipes.load(recipe).with_options(**options), open_headers)
    prepare_sidecars(merge.plan.sidecars, merge.sources)  # reports their problems
    summary = summarise(merge, limit, workers, strict=memory is not None)
    rows = describe_tensors(merge) if tensors else []
    if as_json:
        emit(summary | {"outputs": rows} if tensors else summary)
        return
    show_summary(summary, as_json)
    if tensors:
        say("\n" + _table(rows).text())


def summarise(merge: Merge, memory: int, workers: int | None, strict: bool) -> dict[str, Any]:
    """Return what a merge reads, writes and needs; with `strict`, raise if it needs more memory."""
    from merganser.checkpoints.cards import read_licence
    from merganser.engine.execute import memory_bound
    from merganser.engine.layout import lay_out
    from merganser.errors import InputError
    from merganser.origin.licences import find_conflicts
    from merganser.recipes.sampling import sample_models

    plan, sources = merge.plan, merge.sources
    bound = memory_bound(merge, workers or os.cpu_count() or 1, memory)
    if strict and bound > memory:
        raise InputError(f"--memory {show_size(memory)}: one tensor alone needs {show_size(bound)} with its method")
    licences = [licence for source in sources if (licence := read_licence(source.directory)) is not None]
    methods: dict[str, int] = {}
    read = 0
    for output in plan.outputs:
        methods[output.method] = methods.get(output.method, 0) + 1
        read += sum(sources[source.model].spec(source.name).nbytes for source in _reads(output))
    samples = sample_models(merge)
    return {
        "event": "plan",
        "models": [model.label for model in plan.models],
        "tensors": len(plan.outputs),
        "methods": methods,
        "bytes_in": read,
        "bytes_out": plan.bytes_out,
        "shards": len(lay_out(plan)),
        "memory_bound": bound,
        "download": _downloads(merge),
        "licences": licences,
        "sampled": samples.nbytes,
        "notes": [*plan.notes, *samples.notes, *find_conflicts(licences)],
    }


def _downloads(merge: Merge) -> dict[str, int]:
    """Return the bytes that a merge downloads, by model: all of a hub model, or the ranges read by address."""
    from merganser.checkpoints.references import is_remote, parts

    used: dict[int, set[str]] = {}
    for output in merge.plan.outputs:
        for read in _reads(output):
            used.setdefault(read.model, set()).add(read.name)
    found = {}
    for i, (model, source) in enumerate(zip(merge.plan.models, merge.sources, strict=True)):
        if any(map(is_remote, parts(source.label))):
            streamed = any(map(is_remote, parts(model.path or "")))
            names = used.get(i, set()) if streamed else source.names()
            found[model.label] = sum(source.spec(name).nbytes for name in names)
    return found


def show_summary(summary: dict[str, Any], as_json: bool) -> None:
    """Print what `summarise` returns."""
    if as_json:
        emit(summary)
        return
    methods = ", ".join(f"{name} × {count}" for name, count in sorted(summary["methods"].items()))
    fetched = summary["download"]
    each = ", ".join(f"{label}: {show_size(size)}" for label, size in fetched.items())
    for label, value in (
        ("models", "\n         ".join(summary["models"])),
        ("tensors", f"{summary['tensors']}: {methods}"),
        ("reads", show_size(summary["bytes_in"])),
        ("writes", f"{show_size(summary['bytes_out'])} in {summary['shards']} file(s)"),
        ("memory", f"at most {show_size(summary['memory_bound'])} besides mapped files"),
        *([("download", f"{show_size(sum(fetched.values()))} ({each})")] if fetched else []),
        *([("sampled", f"{show_size(summary['sampled'])} of weights, to compare the models")] if fetched else []),
        *([("licences", ", ".join(dict.fromkeys(summary["licences"])))] if summary["licences"] else []),
        *(("note", note) for note in summary["notes"]),
    ):
        say(f"{label:<8} {value}")


def describe_tensors(merge: Merge) -> list[dict[str, Any]]:
    """Return name, method, sources and effective parameters (defaults included) of every output, in natural order."""
    from merganser.checkpoints.tensor_names import natural_order

    def named(source: Source) -> dict[str, str]:
        return {"model": merge.plan.models[source.model].label, "tensor": source.name}

    return [
        {
            "name": output.name,
            "method": output.method,
            "sources": [named(source) for source in output.inputs],
            "base": named(output.base) if output.base else None,
            "parameters": plain(merge.rule(output).method),
        }
        for output in sorted(merge.plan.outputs, key=lambda output: natural_order(output.name))
    ]


def _reads(output: Output) -> tuple[Source, ...]:
    return (*output.inputs, output.base) if output.base else output.inputs


def _table(rows: list[dict[str, Any]]) -> Table:
    """Return a table with one line for tensors that differ only in numbers; renamed sources are shown as MODEL:NAME."""

    def cells(row: dict[str, Any]) -> tuple[str, ...]:
        def shown(source: dict[str, str]) -> str:
            same = source["tensor"] == row["name"]
            return source["model"] if same else f"{source['model']}:{source['tensor']}"

        parameters = ", ".join(f"{name} {_value(value)}" for name, value in row["parameters"].items())
        base = [f"base {shown(row['base'])}"] if row["base"] else []
        return row["method"], ", ".join([*map(shown, row["sources"]), *base]), parameters

    lines = collapse([(row["name"], cells(row)) for row in rows])
    return Table(("tensor", "method", "sources", "parameters"), [(name, *rest) for name, rest in lines])


def _value(value: Any) -> str:
    """Return a short form of a value: per-model values that agree are written once."""
    if isinstance(value, list) and value and all(each == value[0] for each in value):
        value = value[0]
    return "/".join(map(str, value)) if isinstance(value, list) else str(value)
