"""The root of the command tree: behaviour that all commands share."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from merganser.cli import COMMANDS, PLAIN
from merganser.cli.interrupts import explain_interrupt, explain_left_behind
from merganser.cli.mergekit_flags import refuse_mergekit_flags
from merganser.cli.output import say
from merganser.cli.renamed import rewrite
from merganser.cli.values import take_plain_values
from merganser.cli.wording import name_options
from merganser.errors import MerganserError


class Commands(TyperGroup):
    """All commands. Accepts old spellings, explains Ctrl-C, and names command-line options in errors."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.commands = CommandTable(dict.fromkeys(COMMANDS))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words = rewrite(args)
        if words != args:
            say(f"note: this command is now spelled: {shlex.join(['merganser', *words])}", sys.stderr)
        refuse_mergekit_flags(words)
        path = find_commands(self, words)
        take_plain_values(ctx, path)
        ctx.obj = path[-1]
        return super().parse_args(ctx, words)

    def invoke(self, ctx: Any) -> Any:
        with explain_interrupt(explain_left_behind):
            try:
                return super().invoke(ctx)
            except MerganserError as error:
                error.args = (name_options(str(error), ctx.obj),)
                raise


class CommandTable(dict[str, Any]):
    """Commands by name. Each is imported and built on first use."""

    def __getitem__(self, name: str) -> Any:
        if super().__getitem__(name) is None:
            self[name] = load_command(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401

    def values(self) -> Any:
        return [self[name] for name in self]

    def items(self) -> Any:
        return [(name, self[name]) for name in self]


def load_command(name: str) -> Any:
    """Import a command, or a group of commands, and return it as a click command."""
    location, _, function = COMMANDS[name].partition(":")
    module = import_module(location)
    holder = typer.Typer(**PLAIN)
    if not hasattr(module, "app"):
        holder.command(name)(getattr(module, function or "command"))
        return get_command(holder)
    holder.add_typer(module.app, name=name)
    group: Any = get_command(holder)
    return group.commands[name]


def find_commands(command: Any, words: Sequence[str]) -> list[Any]:
    """Return `command` and the group and command under it that the first words name."""
    path = [command]
    for word in words:
        inner = getattr(path[-1], "commands", {}).get(word)
        if inner is None:
            break
        path.append(inner)
    return path
