"""`merganser library`: a library of experts in about twice the space of their base."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from merganser.cli.options import Base, Json, LibraryPath, MovedBase, Out, Overwrite, RankFraction, Resume
from merganser.cli.output import emit, say, wrote
from merganser.units import parse_size, show_size

if TYPE_CHECKING:
    from merganser.library.library import Library

_MARKS = {True: "ok ", False: "BAD", None: "?  "}

app = typer.Typer(help="Keep many experts of one base as low-rank factors.", no_args_is_help=True)

Energy = Annotated[float | None, typer.Option(help="Share of the energy of each matrix to keep instead.")]
Budget = Annotated[str | None, typer.Option(metavar="SIZE", help="Bytes for all expert files instead, e.g. 2GB.")]
Randomized = Annotated[bool, typer.Option("--randomized", help="Faster, approximate factors.")]


@app.command()
def build(
    library: LibraryPath,
    experts: Annotated[list[str], typer.Argument(metavar="NAME=CKPT", help="The experts by name.")],
    base: Base,
    rank_fraction: RankFraction = None,
    energy: Energy = None,
    budget: Budget = None,
    dtype: Annotated[
        str | None, typer.Option(help="Dtype of the factors: float32, bfloat16, float16 or int8; default: the base's.")
    ] = None,
    copy_base: Annotated[bool, typer.Option("--copy-base", help="Keep a copy of the base in the library.")] = False,
    randomized: Randomized = False,
    as_json: Json = False,
) -> None:
    """Build a library; after an interruption, the same command goes on."""
    from merganser.library.library import Library

    built = Library.build(
        base,
        _all_named(experts),
        library,
        rank_fraction=rank_fraction,
        energy=energy,
        budget=parse_size(budget) if budget else None,
        dtype=dtype,
        copy_base=copy_base,
        randomized=randomized,
        on_step=lambda action, name: say(f"{action} {name}", sys.stderr),
    )
    _show(built, as_json)


@app.command()
def add(
    library: LibraryPath,
    expert: Annotated[str, typer.Argument(metavar="NAME=CKPT", help="The expert by name.")],
    rank_fraction: RankFraction = None,
    energy: Energy = None,
    budget: Budget = None,
    randomized: Randomized = False,
    base: MovedBase = None,
    as_json: Json = False,
) -> None:
    """Add one expert; the others are not touched."""
    name, path = _named(expert)
    grown = _open(library, base).add(
        name,
        path,
        rank_fraction=rank_fraction,
        energy=energy,
        budget=parse_size(budget) if budget else None,
        randomized=randomized,
    )
    _show(grown, as_json)


@app.command()
def remove(
    library: LibraryPath,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Expert to remove.")],
    base: MovedBase = None,
    as_json: Json = False,
) -> None:
    """Remove one expert and its file; after an interruption, the same command finishes it."""
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
    dtype: Annotated[str, typer.Option(help="Dtype of the factors of an adapter.")] = "bfloat16",
    resume: Resume = False,
    overwrite: Overwrite = False,
    base: MovedBase = None,
    as_json: Json = False,
) -> None:
    """Rebuild one expert as an ordinary checkpoint, or as a LoRA adapter for PEFT and vLLM."""
    from merganser.cli.lora import show_report
    from merganser.errors import InputError

    opened = _open(library, base)
    if form == "lora":
        from merganser.library.lora import export_expert

        report = export_expert(opened.expert(name), out, rank=rank, dtype=dtype, overwrite=overwrite)
        show_report(report, as_json)
    elif form == "checkpoint":
        wrote(opened.extract(name, out, resume=resume, overwrite=overwrite), as_json)
    else:
        raise InputError(f"--as {form}: choose checkpoint or lora")


@app.command()
def merge(
    library: LibraryPath,
    out: Out,
    experts: Annotated[
        list[str] | None,
        typer.Option("--expert", "-e", metavar="NAME", help="Expert to merge; may be repeated. Default: all."),
    ] = None,
    scale: Annotated[float, typer.Option(help="Factor of the merged task vector.")] = 1.0,
    rank_fraction: RankFraction = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    base: MovedBase = None,
    as_json: Json = False,
) -> None:
    """Merge experts straight from their stored factors (TSV-Merge)."""
    from merganser.recipes.saving import save

    settings: dict[str, Any] = {"scale": scale}
    if rank_fraction is not None:
        settings["rank_fraction"] = rank_fraction
    merged = _open(library, base).merge(experts or None, **settings)
    wrote(save(merged, out, resume=resume, overwrite=overwrite), as_json)


@app.command()
def verify(library: LibraryPath, base: MovedBase = None, as_json: Json = False) -> None:
    """Read every byte and compare it with what the library says; exit code 1 if something is wrong."""
    findings = _open(library, base).verify()
    if as_json:
        emit(findings)
    else:
        for finding in findings:
            say(f"{_MARKS[finding.sound]}  {finding.part}: {finding.message}")
    if any(finding.sound is False for finding in findings):
        raise typer.Exit(1)


def _open(path: Path, base: str | None) -> Library:
    from merganser.library.library import Library

    return Library(path, base)


def _named(text: str) -> tuple[str, str]:
    from merganser.errors import InputError

    name, separator, path = text.partition("=")
    if not separator or not name or not path:
        raise InputError(f"{text!r}: name the expert and its checkpoint as NAME=CKPT")
    return name, path


def _all_named(texts: list[str]) -> dict[str, str]:
    from merganser.errors import InputError

    named: dict[str, str] = {}
    for name, path in map(_named, texts):
        if name in named:
            raise InputError(f"two experts are called {name!r}: {named[name]} and {path}")
        named[name] = path
    return named


def _show(library: Library, as_json: bool) -> None:
    size = library.size()
    records = library.manifest.experts
    if as_json:
        content = {
            "path": str(library.path),
            "base": library.base.label,
            "base_bytes": size.base,
            "ratio": size.ratio,
            "experts": {
                name: {"bytes": record.nbytes, "energy": record.energy, "source": record.source}
                for name, record in records.items()
            },
        }
        emit(content)
        return
    say(f"base     {library.base.label}, {show_size(size.base)}")
    for name, record in records.items():
        say(f"{name:<24} {show_size(record.nbytes):>12}   {record.energy:.1%} of its energy")
    say(f"in all {show_size(size.total)}, {size.ratio:.2f}× the base")
