"""`merganser report`: write one page about the output of a command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from merganser.cli.options import Check, Json
from merganser.cli.output import emit, say


def command(
    directory: Annotated[
        Path,
        typer.Argument(
            metavar="DIR", help="Output of merge, library, align, auto (OUT.auto), evolve, sweep, evaluate or demo."
        ),
    ],
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the page to this file; default: report.html in DIR.")
    ] = None,
    check: Check = False,
    as_json: Json = False,
) -> None:
    """Write a page about a result.

    One file with a summary, sortable tables and plots, which needs no network and no scripts.

    DIR is a merged checkpoint or adapter, an expert library, an alignment, the output of the demo, or a directory of
    studies (*.sqlite), sweep journals or evaluations (evaluate --json, saved to a .json file); you may also name one
    such file. A directory with several of these becomes one page.
    """
    from merganser.engine.directories import check_file
    from merganser.report.directories import report

    out = html or (directory / "report.html" if directory.is_dir() else directory.with_suffix(".html"))
    check_file(out, "--html" if html else "")
    page, found = report(directory, check=check)
    page.write(out)
    if as_json:
        emit({"event": "done", "path": str(out), "found": found})
        return
    for each in found:
        failed = f": {each['error']}" if "error" in each else ""
        say(f"{each['kind']:<11} {each['path']}{failed}")
    say(f"wrote {out}")
