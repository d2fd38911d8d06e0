"""Values that commands take without a conversion are those that typer would have made of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.main import get_command

from merganser.cli import build
from merganser.cli.commands import find_commands
from merganser.cli.values import take_plain_values


def walk(command: Any) -> Iterator[Any]:
    yield command
    for inner in getattr(command, "commands", {}).values():
        yield from walk(inner)


def tree() -> Any:
    root: Any = get_command(build())
    return root


#: What a user may have written for a parameter that is not a flag.
WRITTEN = ("text", "3", "0.5", "", "recipe")


def test_plain_values_are_those_that_typer_makes() -> None:
    light, typers = tree(), tree()
    context = light.make_context("merganser", [], resilient_parsing=True)
    take_plain_values(context, walk(light))
    compared = 0
    for ours, theirs in zip(walk(light), walk(typers), strict=True):
        for one, other in zip(ours.params, theirs.params, strict=True):
            if other.callback is not None:
                continue
            many = other.multiple or other.nargs == -1
            values = [None, other.get_default(context), *([(word,) if many else word for word in WRITTEN])]
            for value in values:
                assert outcome(one, context, value) == outcome(other, context, value), (ours.name, one.name, value)
                compared += 1
    assert compared > 500


def outcome(parameter: Any, context: Any, value: Any) -> Any:
    """Return the value and its type, or the message."""
    try:
        taken = parameter.process_value(context, value)
    except Exception as error:
        return type(error).__name__, str(error)
    return type(taken), taken


def test_a_file_that_cannot_be_read_is_reported_by_typer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "recipe.yml").touch()
    root = tree()
    context = root.make_context("merganser", [], resilient_parsing=True)
    path = find_commands(root, ["plan"])
    take_plain_values(context, path)
    monkeypatch.setattr("os.access", lambda *_: False)
    recipe = next(each for each in path[-1].params if each.name == "recipe")
    with pytest.raises(typer.BadParameter, match="not readable"):
        recipe.process_value(context, str(tmp_path / "recipe.yml"))
