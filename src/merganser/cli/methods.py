"""`merganser methods`: list the merging rules and their parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from merganser.cli.options import Json
from merganser.cli.output import emit, say
from merganser.report.tables import Table

if TYPE_CHECKING:
    from merganser.methods.catalogue import MethodRow, ParameterRow


def command(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="One method, with its formula; default: all of them.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List the merging methods, or show one with its formula and parameters."""
    from merganser.methods.catalogue import catalogue, describe
    from merganser.methods.plugins import load_plugins
    from merganser.methods.registry import FUNCTIONS_OF_DATA

    if name is not None:
        row = _function_of_data(name) if name in FUNCTIONS_OF_DATA else describe(name)
        if as_json:
            emit(row)
        else:
            say(_one(row))
        return
    rows = catalogue()
    if as_json:
        emit(rows)
        return
    for row in rows:
        settings = ", ".join(map(_setting, row.parameters))
        say(f"{row.name:<20} {row.summary}" + (f" ({settings})" if settings else ""))
    say(f"\n{len(rows)} methods; `merganser methods NAME` shows one with its formula.")
    for package, why in load_plugins().items():
        say(f"The plugin {package} could not be imported: {why}")
    say(f"From Python with data (mg.tuning): {', '.join(FUNCTIONS_OF_DATA)}.")


def _function_of_data(name: str) -> MethodRow:
    from merganser.tuning.in_memory import IN_MEMORY

    return IN_MEMORY[name]


def _setting(parameter: ParameterRow) -> str:
    return f"{parameter.name} {parameter.default}"


def _one(row: MethodRow) -> str:
    also = f" (also {', '.join(row.also)})" if row.also else ""
    facts = [
        f"models      {row.models}",
        f"base        {row.base}",
        f"reach       {row.reach}",
        *([f"statistics  {', '.join(row.statistics)}"] if row.statistics else []),
    ]
    parts = [f"{row.name}{also}: {row.summary}", row.description, "\n".join(facts)]
    if row.parameters:
        parts.append(
            Table(
                ("parameter", "default", "values", "per model", "meaning"),
                [(p.name, p.default, p.bounds, "yes" if p.per_model else "", _meaning(p)) for p in row.parameters],
            ).text()
        )
    return "\n\n".join(parts)


def _meaning(parameter: ParameterRow) -> str:
    also = f" (also {', '.join(parameter.aliases)})" if parameter.aliases else ""
    return parameter.help + also
