"""`merganser schema`: JSON Schemas of recipes and run files, for editors."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from merganser.cli.options import Json
from merganser.cli.output import emit, write
from merganser.errors import one_of


def command(
    document: Annotated[
        str,
        typer.Argument(
            metavar="DOCUMENT", help="Document to describe: recipe (of a merge) or run (run file of evolve)."
        ),
    ],
    as_json: Json = False,
) -> None:
    """Print the JSON Schema of recipes or run files.

    Editors complete and validate documents with it.

    Save it beside your files and name it in their first line: # yaml-language-server: $schema=recipe.schema.json
    """
    one_of("document", document, ("recipe", "run"))
    if document == "recipe":
        from merganser.recipes.json_schema import recipe_schema

        found = recipe_schema()
    else:
        from merganser.evolve.runfile import RunFile
        from merganser.evolve.schema import json_schema

        found = json_schema(RunFile)
    if as_json:
        emit(found)
    else:
        write(f"{json.dumps(found, indent=2)}\n")
