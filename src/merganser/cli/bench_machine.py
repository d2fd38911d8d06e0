"""`merganser bench-machine`: the constants of a machine, and how long merges would take on more of it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from merganser.cli.options import Json
from merganser.cli.output import emit, say
from merganser.report.tables import Table
from merganser.units import parse_size

if TYPE_CHECKING:
    from merganser.scaling.times import Machine, Resources, Work

#: The kinds of rules whose time is predicted where no recipe is given, with a method that stands for each.
KINDS = {"elementwise": "linear", "reduce_map": "ties", "whole": "tsv"}
#: How many models the predictions merge with a base.
MODELS = 2


def command(
    recipe: Annotated[
        Path | None,
        typer.Argument(metavar="RECIPE", help="Recipe whose merge is predicted; default: Llamas of 4 sizes."),
    ] = None,
    cores: Annotated[
        int | None, typer.Option("--cores", min=1, help="Cores of a machine; default: those here.")
    ] = None,
    disks: Annotated[int, typer.Option("--disks", min=1, help="Disks of a machine, each like the one measured.")] = 1,
    machines: Annotated[int, typer.Option("--machines", min=1, help="Machines that share the work.")] = 1,
    cached: Annotated[bool, typer.Option("--cached", help="Predict for inputs that are in memory already.")] = False,
    directory: Annotated[
        Path, typer.Option("--directory", metavar="DIR", help="Where to write test files: on the disk to measure.")
    ] = Path(),
    size: Annotated[str, typer.Option("--size", metavar="SIZE", help="Size of the test files.")] = "64MiB",
    as_json: Json = False,
) -> None:
    """Measure this machine and predict times of merges.

    Also predicts them for more cores, disks and machines like it.

    Writes temporary files to DIR, reads and merges them: a few seconds. With RECIPE, whose models are not read beyond
    their headers, predicts that merge. docs/scaling.md explains the model.
    """
    from merganser.errors import InputError
    from merganser.scaling.constants import measure
    from merganser.scaling.times import Resources, predict

    if not directory.is_dir():
        raise InputError(f"{directory} is not a directory; choose one on the disk to measure")
    content = parse_size(size)
    work = {"recipe": _describe_recipe(recipe)} if recipe is not None else _describe_llamas()
    machine = measure(directory, content)
    resources = Resources(cores or machine.cores, disks, machines, cached)
    estimates = {name: predict(each, machine, resources) for name, each in work.items()}
    if as_json:
        predictions = [{"merge": name, "limit": e.limit, **asdict(e)} for name, e in estimates.items()]
        emit({"machine": asdict(machine), "resources": asdict(resources), "predictions": predictions})
        return
    say(_format_constants(machine) + "\n")
    rows = [
        (name, f"{work[name].bytes_in / 1e9:,.1f} GB", _show(e.seconds), e.limit, _show(e.stages["processors"]),
         _show(e.stages["disks"]))
        for name, e in estimates.items()
    ]  # fmt: skip
    say(
        Table(("merge", "reads", "takes", "limited by", "processors", "disks"), rows, _format_caption(resources)).text()
    )


def _describe_recipe(recipe: Path) -> Work:
    from merganser import recipes
    from merganser.checkpoints.opening import open_headers
    from merganser.scaling.times import describe_work

    return describe_work(recipes.prepare(recipes.load(recipe), open_headers))


def _describe_llamas() -> dict[str, Work]:
    from merganser.scaling.llamas import SIZES, llama_shapes
    from merganser.scaling.times import merge_of

    return {
        f"{size} {method}": merge_of(llama_shapes(*shape), MODELS, kind)
        for size, shape in SIZES.items()
        for kind, method in KINDS.items()
    }


def _format_constants(machine: Machine) -> str:
    values: dict[str, Any] = {
        "cores": machine.cores,
        "start-up": f"{machine.start_up:.2f} s of processor",
        "tensor": f"{machine.per_tensor * 1e3:.2f} ms of processor besides its bytes",
        "write": f"{machine.write / 1e9:.2f} GB/s, synced",
        "read": f"{machine.read / 1e9:.2f} GB/s from disk, {machine.latency * 1e3:.2f} ms for a small read",
        "cached": f"{machine.read_cached / 1e9:.2f} GB/s by one thread, {machine.read_cached_all / 1e9:.2f} by all",
        "elementwise": f"{machine.elementwise / 1e9:.2f} GB per processor second (linear)",
        "reduce_map": f"{machine.reduce_map / 1e9:.2f} GB per processor second (ties)",
        "whole": f"{machine.whole / 1e9:.2f}e9 (d + 16n)·n²·T per processor second (tsv)",
    }
    return "\n".join(f"{name:<12} {value}" for name, value in values.items())


def _format_caption(resources: Resources) -> str:
    kept = ", inputs in memory" if resources.cached else ""
    cores = f"{resources.cores} core{'s' * (resources.cores != 1)}"
    disks = f"{resources.disks} disk{'s' * (resources.disks != 1)}"
    return f"Predicted for {resources.machines} × ({cores}, {disks}){kept}:"


def _show(seconds: float) -> str:
    from merganser.units import show_time

    return f"{seconds:.1f} s" if seconds < 60 else show_time(seconds)
