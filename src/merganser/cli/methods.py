"""`merganser methods`: list the merging methods, or describe one."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from merganser.cli.options import Json
from merganser.cli.output import emit, say, wrap
from merganser.report.tables import Table, terminal_width

if TYPE_CHECKING:
    from merganser.methods.catalogue import MethodRow, ParameterRow


def command(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="One method, with its formula; default: all of them.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List the merging methods, or describe one.

    Describes a method by its formula and its parameters.
    """
    from merganser.methods.catalogue import catalogue, describe
    from merganser.methods.plugins import load_plugins
    from merganser.methods.registry import FUNCTIONS_OF_DATA

    if name is not None:
        row = _function_of_data(name) if name in FUNCTIONS_OF_DATA else describe(name)
        if as_json:
            emit(row)
        else:
            say(_format_method(row))
        return
    rows = catalogue()
    if as_json:
        emit(rows)
        return
    for row in rows:
        say(wrap(f"{row.name:<20} {row.summary}", " " * 21))
    say("\n" + wrap(f"{len(rows)} methods; `merganser methods NAME` shows the formula and the parameters of one."))
    for package, why in load_plugins().items():
        say(f"The plugin {package} could not be imported: {why}")
    say(wrap(f"From Python with data (mg.tuning): {', '.join(FUNCTIONS_OF_DATA)}."))


def _function_of_data(name: str) -> MethodRow:
    from merganser.tuning.in_memory import IN_MEMORY

    return IN_MEMORY[name]


def _format_method(row: MethodRow) -> str:
    also = f" (also {', '.join(row.also)})" if row.also else ""
    facts = [
        f"models      {row.models}",
        f"base        {row.base}",
        f"cost        {row.cost}",
        *([f"statistics  {', '.join(row.statistics)}"] if row.statistics else []),
    ]
    parts = [wrap(f"{row.name}{also}: {row.summary}"), _fit_paragraphs(row.description), "\n".join(facts)]
    if row.parameters:
        cells = [
            (p.name, p.default, p.bounds, "yes" if p.per_model else "", _format_meaning(p)) for p in row.parameters
        ]
        table = Table(("parameter", "default", "values", "per model", "meaning"), cells).text(width=sys.maxsize)
        narrow = max(map(len, table.splitlines())) > terminal_width()
        parts.append("\n".join(map(_format_parameter, row.parameters)) if narrow else table)
    return "\n\n".join(parts)


def _fit_paragraphs(text: str) -> str:
    """Paragraphs as they were written if they fit, else filled anew."""
    if max(map(len, text.splitlines())) <= terminal_width():
        return text
    return "\n\n".join(wrap(" ".join(part.split())) for part in text.split("\n\n"))


def _format_parameter(parameter: ParameterRow) -> str:
    """A parameter where a table has no room."""
    each = ", per model" if parameter.per_model else ""
    bounds = f" ({parameter.bounds})" if parameter.bounds else ""
    head = f"{parameter.name}, default {parameter.default}{bounds}{each}"
    return f"{wrap(head, '  ')}\n{wrap(f'  {_format_meaning(parameter)}', '  ')}"


def _format_meaning(parameter: ParameterRow) -> str:
    also = f" (also {', '.join(parameter.aliases)})" if parameter.aliases else ""
    return parameter.help + also
