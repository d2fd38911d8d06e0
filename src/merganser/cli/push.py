"""`merganser push`: upload a merged model to the hub, with its card."""

from __future__ import annotations

from typing import Annotated

import typer

from merganser.cli.options import Json, Made
from merganser.cli.output import emit, say
from merganser.units import show_size


def command(
    directory: Made,
    repository: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="Repository on the hub; created if needed.")],
    private: Annotated[bool, typer.Option("--private", help="Create a private repository.")] = False,
    revision: Annotated[str | None, typer.Option("--revision", help="Branch to upload to.")] = None,
    check: Annotated[
        bool, typer.Option("--verify/--no-verify", help="Compare with the lock file before uploading.")
    ] = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List what would be uploaded; needs no network.")] = False,
    as_json: Json = False,
) -> None:
    """Upload a merged model to the hub.

    Its card, recipe and lock file go with it.

    Log in first with `hf auth login`, or set HF_TOKEN. Uploads only the files listed in the lock file, the card and the
    lock file itself.
    """
    from merganser.origin import push

    done = push(directory, repository, private=private, revision=revision, check=check, dry_run=dry_run)
    if as_json:
        emit({"event": "plan" if dry_run else "done"} | vars(done))
        return
    for name, size in done.files.items():
        say(f"{show_size(size):>10}  {name}")
    total = f"{len(done.files)} files, {show_size(sum(done.files.values()))}"
    say(f"would upload {total} to {repository}" if dry_run else f"uploaded {total} to {done.url}")
