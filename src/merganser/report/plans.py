"""What a merge will do, as data and as text, for the command line, the studio and notebooks."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from merganser.plain import plain
from merganser.report.collapsing import collapse
from merganser.units import show_size

if TYPE_CHECKING:
    from merganser.engine.merge import Merge
    from merganser.engine.plan import Output, Plan, Source


def summarise_plan(plan: Plan) -> dict[str, Any]:
    """Return what a plan merges and writes, as JSON-serialisable values."""
    from merganser.engine.layout import lay_out

    return {
        "event": "plan",
        "models": [model.label for model in plan.models],
        "tensors": len(plan.outputs),
        "methods": dict(Counter(output.method for output in plan.outputs)),
        "bytes_out": plan.bytes_out,
        "shards": len(lay_out(plan)),
        "notes": list(plan.notes),
    }


def summarise(merge: Merge, memory: int, workers: int | None = None) -> dict[str, Any]:
    """Return what a merge reads, writes and needs, as JSON-serialisable values; reads a few numbers of each model.

    A quantised merge is described as the merge that is quantised, except for what it writes.
    """
    from merganser.checkpoints.cards import read_licence
    from merganser.engine.footprint import memory_bound
    from merganser.engine.layout import lay_out
    from merganser.origin.licences import find_conflicts
    from merganser.recipes.sampling import sample_models

    inner = merge.quantises or merge
    plan, sources = inner.plan, inner.sources
    licences = [licence for source in sources if (licence := read_licence(source.directory)) is not None]
    samples = sample_models(inner)
    read = [
        sources[source.model].spec(source.name).nbytes for output in plan.outputs for source in _measure_reads(output)
    ]
    return summarise_plan(plan) | {
        "bytes_in": sum(read),
        "bytes_out": merge.plan.bytes_out,
        "shards": len(lay_out(merge.plan)),
        "memory_bound": memory_bound(merge, workers or os.cpu_count() or 1, memory),
        "download": _measure_downloads(inner),
        "licences": licences,
        "sampled": samples.nbytes,
        "notes": [*merge.plan.notes, *samples.notes, *find_conflicts(licences)],
    }


def facts(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the summary of a merge or of a plan as labels and values for people; notes come last."""
    methods = ", ".join(f"{name} × {count}" for name, count in sorted(summary["methods"].items()))
    fetched: Mapping[str, int] = summary.get("download", {})
    each = ", ".join(f"{label}: {show_size(size)}" for label, size in fetched.items())
    files = "1 file" if summary["shards"] == 1 else f"{summary['shards']} files"
    found = {
        "models": "\n         ".join(summary["models"]),
        "tensors": f"{summary['tensors']}: {methods}",
        "reads": show_size(summary["bytes_in"]) if "bytes_in" in summary else "",
        "writes": f"{show_size(summary['bytes_out'])} in {files}",
        "memory": f"at most {show_size(summary['memory_bound'])} besides mapped files"
        if "memory_bound" in summary
        else "",
        "download": f"{show_size(sum(fetched.values()))} ({each})" if fetched else "",
        "sampled": f"{show_size(summary['sampled'])} of weights, to compare the models" if fetched else "",
        "licences": ", ".join(dict.fromkeys(summary.get("licences", ()))),
    }
    return [*((label, value) for label, value in found.items() if value), *(("note", n) for n in summary["notes"])]


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


def tensor_list(rows: list[dict[str, Any]]) -> str:
    """Return every rule, with its sources and parameters, above the tensors that it merges.

    Tensors that differ only in numbers share a line, and renamed sources are shown as MODEL:NAME.
    """
    rules: dict[str, list[tuple[str, str]]] = {}
    for row in rows:
        base = f"; base {row['base']['model']}" if row["base"] else ""
        sources = [*row["sources"], *([row["base"]] if row["base"] else [])]
        renamed = [f"{each['model']}:{each['tensor']}" for each in sources if each["tensor"] != row["name"]]
        parameters = ", ".join(f"{name} {_format_value(value)}" for name, value in row["parameters"].items())
        models = ", ".join(each["model"] for each in row["sources"])
        rule = f"{row['method']} of {models}{base}{parameters and '; '}{parameters}"
        rules.setdefault(rule, []).append((row["name"], ", ".join(renamed)))
    parts = []
    for rule, tensors in rules.items():
        lines = [f"{name} from {renamed}" if renamed else name for name, renamed in collapse(tensors)]
        parts.append("\n    ".join([rule, *lines]))
    return "\n\n".join(parts)


def _measure_downloads(merge: Merge) -> dict[str, int]:
    """Return the bytes that a merge downloads, by model: all of a hub model, or the ranges read by address."""
    from merganser.checkpoints.references import is_remote, parts

    used: dict[int, set[str]] = {}
    for output in merge.plan.outputs:
        for read in _measure_reads(output):
            used.setdefault(read.model, set()).add(read.name)
    found = {}
    for i, (model, source) in enumerate(zip(merge.plan.models, merge.sources, strict=True)):
        if any(map(is_remote, parts(source.label))):
            streamed = any(map(is_remote, parts(model.path or "")))
            names = used.get(i, set()) if streamed else source.names()
            found[model.label] = sum(source.spec(name).nbytes for name in names)
    return found


def _measure_reads(output: Output) -> tuple[Source, ...]:
    return (*output.inputs, output.base) if output.base else output.inputs


def _format_value(value: Any) -> str:
    """Return a short form of a value: per-model values that agree are written once."""
    if isinstance(value, list) and value and all(each == value[0] for each in value):
        value = value[0]
    return "/".join(map(str, value)) if isinstance(value, list) else str(value)
