"""The root of the command tree: what all commands have in common."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from typing import Any

from typer.core import TyperGroup

from merganser.cli.interrupts import explain_interrupt, left_behind
from merganser.cli.output import say
from merganser.cli.renamed import rewrite
from merganser.cli.wording import name_options
from merganser.errors import MerganserError


class Commands(TyperGroup):
    """All commands: accepts old spellings, explains Ctrl-C, and says in errors which option to use."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words = rewrite(args)
        if words != args:
            say(f"note: this is now written: {shlex.join(['merganser', *words])}", sys.stderr)
        ctx.obj = find_command(self, words)
        return super().parse_args(ctx, words)

    def invoke(self, ctx: Any) -> Any:
        with explain_interrupt(left_behind):
            try:
                return super().invoke(ctx)
            except MerganserError as error:
                error.args = (name_options(str(error), ctx.obj),)
                raise


def find_command(command: Any, words: Sequence[str]) -> Any:
    """Return the command or group that the first words name, under `command`."""
    for word in words:
        inner = getattr(command, "commands", {}).get(word)
        if inner is None:
            break
        command = inner
    return command
