"""The command line: thin commands over the library. Heavy packages are imported only when a command runs."""

from __future__ import annotations

import atexit
import contextlib
import errno
import gc
import os
import sys
from typing import Any

from merganser.cli.limits import raise_open_files
from merganser.cli.output import emit, prepare_streams, say
from merganser.errors import MerganserError
from merganser.excerpts import shorten

#: Command or group of commands -> the module that defines it as `app` or `command`, or `module:function`.
COMMANDS = {
    "merge": "merganser.cli.merge",
    "plan": "merganser.cli.plan",
    "verify": "merganser.cli.verify",
    "lineage": "merganser.cli.lineage",
    "push": "merganser.cli.push",
    "methods": "merganser.cli.methods",
    "schema": "merganser.cli.schema",
    "inspect": "merganser.cli.inspect",
    "align": "merganser.cli.align",
    "transport": "merganser.cli.transport",
    "library": "merganser.cli.library",
    "extract-lora": "merganser.cli.lora",
    "merge-lora": "merganser.cli.lora:merge_command",
    "transplant-tokenizer": "merganser.cli.transplant",
    "moe": "merganser.cli.moe",
    "match-experts": "merganser.cli.expert_matching",
    "decode": "merganser.cli.decode",
    "serve": "merganser.cli.serve",
    "auto": "merganser.cli.auto",
    "evaluate": "merganser.cli.evaluate",
    "sweep": "merganser.cli.sweep",
    "evolve": "merganser.cli.evolve",
    "report": "merganser.cli.report",
    "studio": "merganser.cli.studio",
    "demo": "merganser.cli.demo",
    "bench-machine": "merganser.cli.bench_machine",
}
INTERRUPTED = 130
#: What the system says of a path that must be another one.
_UNUSABLE = (errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR)
#: Messages and help as plain text, for logs and for readers of every kind of terminal.
PLAIN: dict[str, Any] = {"pretty_exceptions_enable": False, "add_completion": False, "rich_markup_mode": None}


def build() -> Any:
    """Return the typer application. A command is imported when it is called, or when help lists it."""
    import typer

    from merganser.cli.commands import Commands

    app = typer.Typer(
        name="merganser",
        cls=Commands,
        help="Merge, align, compress, route and evolve neural networks in weight space.",
        no_args_is_help=True,
        **PLAIN | {"add_completion": True},
    )

    @app.callback(invoke_without_command=True)
    def root(
        version: bool = typer.Option(False, "--version", help="Print the version and stop.", is_eager=True),
    ) -> None:
        if version:
            from merganser import __version__

            say(__version__)
            raise typer.Exit

    return app


def main() -> None:
    """Run the command line. Errors become one message on stderr and an exit code, never a traceback."""
    atexit.register(gc.freeze)  # else the interpreter looks for garbage among all objects once more before it ends
    raise_open_files()
    prepare_streams()
    try:
        build()(standalone_mode=True)
    except MerganserError as error:
        fail(str(error), error.exit_code)
    except KeyboardInterrupt:  # before a command began
        fail("interrupted: nothing was written", INTERRUPTED)
    except Exception as error:
        if os.environ.get("MERGANSER_DEBUG"):
            raise
        if isinstance(error, OSError) and error.errno in _UNUSABLE and error.filename is not None:
            fail(f"{shorten(str(error.filename), 120)}: {str(error.strerror).lower()}", 2)
        fail(f"unexpected {type(error).__name__}: {error} (MERGANSER_DEBUG=1 shows where)", 1)


def fail(message: str, code: int) -> None:
    with contextlib.suppress(MerganserError):  # standard output itself may have failed
        if "--json" in sys.argv:
            emit({"event": "error", "message": message, "exit_code": code})
    with contextlib.suppress(MerganserError):
        say(message if code == INTERRUPTED else f"error: {message}", sys.stderr)
    sys.exit(code)
