"""`merganser lineage`: show what a merged model descends from, and under which licences."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from merganser.cli.options import Json, Made, Root
from merganser.cli.output import emit, say, wrap


def command(
    directory: Made,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the graph on a page in this file.")] = None,
    root: Root = None,
    as_json: Json = False,
) -> None:
    """Show what a model was merged from.

    Follows merges of merges, adapters and libraries by the lock files of the source models, as far as these are
    available. Licences that conflict are reported by their names on the hub; this is not legal advice.
    """
    from merganser.origin import trace

    family = trace(directory, root=root)
    if html is not None:
        from merganser.engine.directories import check_file
        from merganser.report.lineage import lineage_page

        check_file(html, "--html")
        lineage_page(family).write(html)
    if as_json:
        emit(
            {
                "event": "lineage",
                "tree": family.root,
                "licences": family.licences,
                "conflicts": family.conflicts,
                "terms": family.terms,
                "notes": family.notes,
                "path": str(html) if html else None,
            }
        )
        return
    for line in family.lines():
        say(line)
    say("")
    for licence, labels in family.licences.items():
        say(f"licence  {licence}: {', '.join(labels)}")
    for conflict in family.conflicts:
        say(wrap(f"conflict {conflict}", " " * 9))
    for each in (*family.terms, *family.notes):
        say(wrap(f"note     {each}", " " * 9))
    if html is not None:
        say(f"wrote {html}")
