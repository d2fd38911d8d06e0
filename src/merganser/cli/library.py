"""`merganser library`: keep many experts of one base in few bytes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from merganser.cli.naming import read_pairs
from merganser.cli.options import (
    Base,
    Experts,
    FactorDtype,
    Json,
    LibraryPath,
    LowRankOnly,
    MovedBase,
    Out,
    Overwrite,
    RankFraction,
    Resume,
    Tensors,
)
from merganser.cli.output import emit, say
from merganser.cli.progress import ProgressReporter
from merganser.cli.writing import writing
from merganser.errors import InputError
from merganser.units import show_size

if TYPE_CHECKING:
    from collections.abc import Callable

    from merganser.checkpoints.base import Checkpoint
    from merganser.library.library import Library

_EXPERT = "NAME=CKPT, an expert's name and its checkpoint"
_MARKS = {True: "ok ", False: "BAD", None: "?  "}

app = typer.Typer(help="Keep many experts of one base in few bytes.", no_args_is_help=True)

Energy = Annotated[float | None, typer.Option(help="Share of each matrix's energy to keep, instead of a rank.")]
Budget = Annotated[
    str | None,
    typer.Option(
        metavar="LIMIT", help="Total size of the expert files, e.g. 2GB; each tensor gets the best code within it."
    ),
]
Codes = Annotated[
    list[str] | None,
    typer.Option(
        "--code",
        metavar="CODE",
        help="Code the budget may use; may be repeated: signs, levels, factors, shared. Default: all.",
    ),
]
Randomized = Annotated[bool, typer.Option("--randomized", help="Compute approximate factors, faster.")]

Grams = Annotated[
    list[str] | None,
    typer.Option(
        "--gram",
        metavar="NAME=FILE",
        help="Gram matrices of an expert's inputs, to weight its errors; may be repeated.",
    ),
]


@app.command()
def build(
    library: LibraryPath,
    experts: Annotated[list[str], typer.Argument(metavar="NAME=CKPT", help="The experts by name.")],
    base: Base,
    rank_fraction: RankFraction = None,
    energy: Energy = None,
    budget: Budget = None,
    codes: Codes = None,
    grams: Grams = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="Dtype of plain factors: float32, bfloat16, float16 or int8; default: the base's."),
    ] = None,
    copy_base: Annotated[bool, typer.Option("--copy-base", help="Keep a copy of the base in the library.")] = False,
    randomized: Randomized = False,
    as_json: Json = False,
) -> None:
    """Build a library.

    After an interruption, run the same command again.
    """
    from merganser.library.library import Library

    named = read_pairs(experts, _EXPERT)
    with ProgressReporter("building", "steps") as reporter:
        built = Library.build(
            base,
            named,
            library,
            rank_fraction=rank_fraction,
            energy=energy,
            budget=budget,
            codes=codes or None,
            grams=read_pairs(grams or (), "NAME=FILE", "--gram"),
            dtype=dtype,
            copy_base=copy_base,
            randomized=randomized,
            on_step=_report_steps(reporter, base, len(named), coded=budget is not None and dtype is None),
        )
    _show(built, as_json)


@app.command()
def add(
    library: LibraryPath,
    expert: Annotated[str, typer.Argument(metavar="NAME=CKPT", help="The expert by name.")],
    rank_fraction: RankFraction = None,
    energy: Energy = None,
    budget: Budget = None,
    codes: Codes = None,
    grams: Grams = None,
    randomized: Randomized = False,
    base: MovedBase = None,
    as_json: Json = False,
) -> None:
    """Add one expert; the others do not change."""
    [(name, path)] = read_pairs([expert], _EXPERT).items()
    given = read_pairs(grams or (), "NAME=FILE", "--gram")
    if others := given.keys() - {name}:
        raise InputError(f"--gram {min(others)}: the expert that is added is {name}")
    opened = _open(library, base)
    coded = budget is not None or opened.manifest.policy.codes
    with ProgressReporter("adding", "steps") as reporter:
        grown = opened.add(
            name,
            path,
            rank_fraction=rank_fraction,
            energy=energy,
            budget=budget,
            codes=codes or None,
            gram=given.get(name),
            randomized=randomized,
            on_step=_report_steps(reporter, opened.base, 1, coded=bool(coded)),
        )
    _show(grown, as_json)


@app.command()
def remove(
    library: LibraryPath,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Expert to remove.")],
    base: MovedBase = None,
    as_json: Json = False,
) -> None:
    """Remove one expert and its file.

    After an interruption, run the same command again.
    """
    _show(_open(library, base).remove(name), as_json)


@app.command("list")
def list_experts(library: LibraryPath, base: MovedBase = None, as_json: Json = False) -> None:
    """List the experts with their sizes and the energy kept."""
    _show(_open(library, base), as_json)


@app.command()
def extract(
    library: LibraryPath,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Expert to rebuild.")],
    out: Out,
    form: Annotated[
        str, typer.Option("--as", help="What to write: checkpoint, or lora for a PEFT adapter.")
    ] = "checkpoint",
    rank: Annotated[int | None, typer.Option(min=1, help="Rank of the adapter; default: the stored one.")] = None,
    budget: Annotated[
        str | None,
        typer.Option(metavar="LIMIT", help="Total size of the adapter's factors instead of a rank, e.g. 5MB."),
    ] = None,
    low_rank_only: LowRankOnly = False,
    dtype: FactorDtype = "bfloat16",
    resume: Resume = False,
    overwrite: Overwrite = False,
    base: MovedBase = None,
    as_json: Json = False,
) -> None:
    """Rebuild one expert as a checkpoint or LoRA adapter.

    PEFT and vLLM load the adapter.
    """
    from merganser.cli.lora import show_report

    opened = _open(library, base)
    if form == "lora":
        from merganser.library.lora import export_expert

        made = export_expert(
            opened.expert(name),
            out,
            rank=rank,
            budget=budget,
            whole=not low_rank_only,
            dtype=dtype,
            overwrite=overwrite,
        )
        show_report(made, as_json)
    elif form == "checkpoint":
        if rank is not None or budget is not None or low_rank_only:
            raise InputError("a rank, a budget and --low-rank-only are for adapters: add --as lora")
        with writing(out, "writing", as_json) as reporting:
            opened.extract(name, out, resume=resume, overwrite=overwrite, **reporting)
    else:
        raise InputError(f"--as {form}: choose checkpoint or lora")


@app.command()
def merge(
    library: LibraryPath,
    out: Out,
    experts: Experts = None,
    scale: Annotated[float, typer.Option(help="Factor on the merged task vector.")] = 1.0,
    rank_fraction: RankFraction = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    base: MovedBase = None,
    as_json: Json = False,
) -> None:
    """Merge experts directly from their stored factors (TSV-Merge)."""
    from merganser.recipes.saving import save

    settings: dict[str, Any] = {"scale": scale}
    if rank_fraction is not None:
        settings["rank_fraction"] = rank_fraction
    merged = _open(library, base).merge(experts or None, **settings)
    with writing(out, "merging", as_json) as reporting:
        save(merged, out, resume=resume, overwrite=overwrite, **reporting)


@app.command()
def report(
    library: LibraryPath,
    experts: Experts = None,
    tensors: Tensors = False,
    base: MovedBase = None,
    as_json: Json = False,
) -> None:
    """Show the size, error and codes of each layer.

    Sizes are in all and in bits for each entry.
    """
    from merganser.library.reporting import describe_stored_tensors, sum_by_layer
    from merganser.report.libraries import tabulate_layers, tabulate_tensors

    opened = _open(library, base)
    names, found = experts or list(opened.experts), []
    with ProgressReporter("reading", "experts") as reporter:
        for name in names:
            reporter.step(name, len(names))
            found += describe_stored_tensors(opened, name)
    layers = sum_by_layer(found)
    if as_json:
        emit({"layers": layers, "tensors": found if tensors else None})
        return
    if tensors:
        say(f"{tabulate_tensors(found).text()}\n")
    say(tabulate_layers(layers).text())


@app.command()
def verify(library: LibraryPath, base: MovedBase = None, as_json: Json = False) -> None:
    """Read every byte and check it.

    Exits with 1 if something is wrong.
    """
    opened = _open(library, base)
    with ProgressReporter("verifying", "files") as reporter:
        findings = opened.verify(lambda part: reporter.step(part, 1 + len(opened.experts)))
    if as_json:
        emit(findings)
    else:
        for finding in findings:
            say(f"{_MARKS[finding.sound]}  {finding.part}: {finding.message}")
    if any(finding.sound is False for finding in findings):
        raise typer.Exit(1)


def _report_steps(
    reporter: ProgressReporter, base: str | Checkpoint, experts: int, coded: bool
) -> Callable[[str, str], None]:
    """Report what a library does, of the most steps it takes: a look at each expert, and each tensor of each."""
    from merganser.checkpoints.opening import open as open_checkpoint

    tensors = len(open_checkpoint(base).names())
    total = experts + experts * tensors + (tensors if coded else 0)
    return lambda action, name: reporter.step(f"{action} {name}", total)


def _open(path: Path, base: str | None) -> Library:
    from merganser.library.library import Library

    return Library(path, base)


def _show(library: Library, as_json: bool) -> None:
    size = library.size()
    records = library.manifest.experts
    if as_json:
        content = {
            "path": str(library.path),
            "base": library.base.label,
            "base_bytes": size.base,
            "shared_bytes": size.shared,
            "ratio": size.ratio,
            "experts": {
                name: {"bytes": record.nbytes, "energy": record.energy, "source": record.source}
                for name, record in records.items()
            },
        }
        emit(content)
        return
    say(f"base     {library.base.label}, {show_size(size.base)}")
    if size.shared:
        say(f"{'shared':<24} {show_size(size.shared):>12}")
    for name, record in records.items():
        say(f"{name:<24} {show_size(record.nbytes):>12}   {record.energy:.1%} of its energy")
    say(f"in all {show_size(size.total)}, {size.ratio:.2f}× the base")
