"""`merganser studio`: open a folder of models in the browser."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from merganser.cli.options import Device, Json
from merganser.cli.output import emit, say

if TYPE_CHECKING:
    from merganser.studio.gate import Gate

#: Seconds without a request after which the studio uses the time for imports.
QUIET = 1.0


def command(
    directory: Annotated[Path, typer.Argument(metavar="[DIR]", help="Folder to open.")] = Path(),
    root: Annotated[
        list[Path] | None,
        typer.Option(
            "--root", metavar="DIR", help="Additional folder that the studio may read and write; may be repeated."
        ),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; another if it is taken.")] = 8765,
    state: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Directory for jobs; default: .merganser in DIR.")
    ] = None,
    device: Device = "cpu",
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page in the browser.")] = True,
    as_json: Json = False,
) -> None:
    """Inspect, mix and compare models in the browser.

    Opens DIR with its checkpoints, recipes, libraries and studies. Listens on this machine only and needs no network.
    Jobs started from the page continue when the page is closed or this command ends.
    """
    from merganser.errors import InputError, require
    from merganser.studio.app import create_app
    from merganser.studio.state import read_token, state_directory

    uvicorn = require("uvicorn", "studio")
    if not directory.is_dir():
        problem = "is a file; name the directory that it is in" if directory.exists() else "no such directory"
        raise InputError(f"{directory}: {problem}")
    kept = state_directory(state or directory / ".merganser")
    token = read_token(kept)
    app = create_app([directory, *(root or [])], kept, token, device)
    listening = _listen(port)
    address = f"http://127.0.0.1:{listening.getsockname()[1]}/#token={token}"
    if as_json:
        emit({"event": "serving", "url": address})
    else:
        say(f"studio on {directory.resolve()}\n{address}\nCtrl-C stops the studio; jobs continue.", sys.stderr)
    threading.Thread(target=_import_torch, args=(app,), daemon=True).start()
    if browser and not as_json:
        threading.Timer(0.5, _show, [address]).start()
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1)
    uvicorn.Server(config).run(sockets=[listening])


def _import_torch(app: Gate) -> None:
    """Import torch, which most screens need sooner or later, once the first page is there and nothing is asked: the
    import takes a processor for seconds, and holds up every answer meanwhile.
    """
    while app.asked is None or time.monotonic() - app.asked < QUIET:
        time.sleep(QUIET / 4)
    import_module("torch")


def _listen(port: int) -> socket.socket:
    """Return a socket on the port, or on a free one if it is taken."""
    from merganser.errors import MerganserError

    for wanted in (port, 0):
        listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind(("127.0.0.1", wanted))
            listening.listen()  # the address must work as soon as it is printed
        except OSError:
            listening.close()
            continue
        return listening
    raise MerganserError("no free port on 127.0.0.1")


def _show(address: str) -> None:
    import webbrowser

    with contextlib.suppress(webbrowser.Error):
        webbrowser.open(address)
