"""`merganser inspect`: show the contents of checkpoints, and how experts of one base interfere."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from merganser.cli.naming import name_checkpoints
from merganser.cli.options import Check, Html, Json, RankFraction, Tensors
from merganser.cli.output import emit, say
from merganser.cli.progress import ProgressReporter
from merganser.report.collapsing import collapse_table

if TYPE_CHECKING:
    from merganser.checkpoints import Checkpoint
    from merganser.interference import Survey
    from merganser.library import Library
    from merganser.report.contents import Contents
    from merganser.report.tables import Table

#: Matrices shown on a terminal by default.
SHOWN = 10
#: Layers of a stack whose interference is measured by default.
LAYERS = 4


def command(
    checkpoints: Annotated[list[str], typer.Argument(metavar="CKPT", help="Paths or NAME=PATH, or one library.")],
    base: Annotated[
        str | None, typer.Option(metavar="CKPT", help="Checkpoint they were fine-tuned from; shows interference.")
    ] = None,
    html: Html = None,
    rank_fraction: RankFraction = None,
    layers: Annotated[
        int, typer.Option(min=0, help="With --base: layers of a stack to measure, evenly spread; 0 for all.")
    ] = LAYERS,
    tensors: Tensors = False,
    check: Check = False,
    as_json: Json = False,
) -> None:
    """Show checkpoints, and how experts interfere.

    Without --base: tensors, dtypes and sizes by block, tied names and the fingerprint; for several checkpoints, also
    their distances. With --base, or for an expert library: where the experts interfere, before and after TSV-Merge, how
    similar they are, how much energy a low rank keeps, and what to try next.
    """
    library = _open_library(checkpoints, base)
    named = name_checkpoints(checkpoints)
    if html is not None:
        from merganser.engine.directories import check_file

        check_file(html, "--html")
    source = library if library is not None else base
    if source is None:
        _inspect_contents(named, html, tensors, check, as_json)
        return
    from merganser.interference import survey

    experts = named if library is None else None
    with ProgressReporter("comparing", "matrices") as reporter:
        found = survey(source, experts, rank_fraction=rank_fraction, layers=layers or None, on_progress=reporter)
    if html is not None:
        _write_page(source, experts, found, html)
    if as_json:
        emit(found.to_dict())
        return
    _show_interference(found, tensors)
    if html is not None:
        say(f"\nwrote {html}")


def _open_library(checkpoints: list[str], base: str | None) -> Library | None:
    if len(checkpoints) != 1 or not (Path(checkpoints[0]) / "library.json").is_file():
        return None
    from merganser.library import Library

    return Library(checkpoints[0], base)


def _inspect_contents(named: Mapping[str, str], html: Path | None, tensors: bool, check: bool, as_json: bool) -> None:
    from merganser.checkpoints import open as open_checkpoint
    from merganser.report import contents
    from merganser.report.page import Page

    opened = {name: open_checkpoint(path) for name, path in named.items()}
    described = [contents.contents(checkpoint, check=check) for checkpoint in opened.values()]
    apart, difference = _compare_checkpoints(opened) if len(opened) > 1 else (None, "")
    if html is not None:
        page = Page(f"Checkpoint {next(iter(named))}" if len(named) == 1 else f"{len(named)} checkpoints")
        if apart is not None:
            page.add(apart)
        contents.fill(page, dict(zip(named, described, strict=True)))
        page.write(html)
    if as_json:
        found: dict[str, Any] = {"checkpoints": [each.to_dict() for each in described]}
        if apart is not None:
            found["apart"] = [dict(zip(apart.columns, row, strict=True)) for row in apart.rows]
        emit(found)
        return
    for each in described:
        _show_contents(each, tensors)
    if apart is not None:
        say(apart.text())
    if difference:
        say(f"not compared: {difference}")
    if html is not None:
        say(f"wrote {html}")


def _show_contents(found: Contents, tensors: bool) -> None:
    from merganser.report.contents import blocks_table, facts, tensors_table

    say(found.label)
    for line in facts(found):
        say(f"  {line}")
    table = collapse_table(tensors_table(found)) if tensors else blocks_table(found)
    say(f"\n{table.text()}\n")


def _compare_checkpoints(opened: Mapping[str, Checkpoint]) -> tuple[Table | None, str]:
    """Return the cosine and distance of every pair of checkpoints, or the reason why there are none."""
    from merganser.analysis.similarity import weight_similarity
    from merganser.errors import CheckpointError
    from merganser.report.contents import distance_table

    try:
        found = weight_similarity(opened)
    except CheckpointError as error:
        return None, str(error)
    return distance_table(found), ""


def _write_page(source: Library | str, experts: Mapping[str, str] | None, found: Survey, html: Path) -> None:
    from merganser.interference.surveys import similarity
    from merganser.report.interference import HeatMap, describe_left_out, describe_sampled, fill, heat_map_rank, loudest
    from merganser.report.page import Page

    overlap = None
    if (matrix := loudest(found)) is not None:
        rank = heat_map_rank(found, matrix)
        overlap = HeatMap(matrix.name, rank, similarity(source, experts, matrix.name, rank)[0])
    label = source if isinstance(source, str) else source.path
    intro = [f"{', '.join(found.experts)}; base {label}", *describe_left_out(found), *describe_sampled(found)]
    page = Page("Interference of experts", ". ".join(intro) + ".")
    fill(page, found, overlap)
    page.write(html)


def _show_interference(found: Survey, tensors: bool) -> None:
    from merganser.report.interference import (
        block_table,
        cosine_table,
        describe_left_out,
        describe_sampled,
        expert_table,
        matrix_table,
    )

    shown = [expert_table(found), matrix_table(found, None if tensors else SHOWN)]
    if len(found.experts) > 1:
        shown = [block_table(found), cosine_table(found), *shown]
    for line in (*describe_left_out(found), *(f"{each} (--layers 0 measures all)" for each in describe_sampled(found))):
        say(line)
    if not found.matrices:
        say("no matrix differs from the base: nothing can interfere")
        return
    say("\n\n".join(each.text() for each in shown))
    say("\n".join(["", *(f"{advice.kind}: {advice.text}" for advice in found.advice)]))
