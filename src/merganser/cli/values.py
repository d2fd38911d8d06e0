"""Values of arguments and options that need no conversion: text, paths, defaults, and what was not given.

typer converts all of these with pydantic, whose import takes as long as the answer of many commands. Numbers that the
user types are still converted and checked by typer.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, get_args, get_origin


def take_plain_values(context: Any, commands: Iterable[Any]) -> None:
    """Let the parameters of commands, `--help` among them, accept plain values without a conversion.

    Versions of typer that convert without pydantic are left alone.
    """
    for parameter in (each for command in commands for each in command.get_params(context)):
        descriptor = getattr(parameter, "type_descriptor", None)
        if descriptor is not None:
            parameter.process_value = _shortcut(parameter, descriptor.annotation)


def _shortcut(parameter: Any, annotation: Any) -> Callable[[Any, Any], Any]:
    """Return `process_value` of a parameter, converting only what is not plain."""
    convert = parameter.process_value
    many = parameter.multiple or parameter.nargs == -1
    element = get_args(annotation)[0] if get_origin(annotation) is list else annotation

    def process_value(context: Any, value: Any) -> Any:
        if value is None and not parameter.required:
            taken: Any = () if many else None
        elif many and isinstance(value, list | tuple) and value and all(_is_plain(each, element) for each in value):
            taken = [Path(each) if element is Path else each for each in value]
        elif not many and _is_plain(value, annotation):
            taken = Path(value) if annotation is Path else value
        else:
            return convert(context, value)
        return taken if parameter.callback is None else parameter.callback(context, parameter, taken)

    return process_value


def _is_plain(value: Any, annotation: Any) -> bool:
    """Return whether a value is of its parameter's type, or a path that can be read or created."""
    if annotation is Path and type(value) is str:
        return os.access(value, os.R_OK) or not os.path.lexists(value)
    return annotation in (str, int, float, bool) and type(value) is annotation
