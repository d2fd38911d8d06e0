"""`push`: upload an output to the hub, with its card, recipe and lock file."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from merganser.checkpoints.references import HUB_ID
from merganser.engine.origin import CARD, LOCK_FILE, SINGLE
from merganser.errors import InputError, MerganserError, first_line, require
from merganser.origin.lock_file import read_lock
from merganser.origin.verification import verify

_SECRET = re.compile(r"hf_\w+|(?i:bearer)\s+\S+")


@dataclass(frozen=True)
class Upload:
    """The files of an upload to the hub.

    Attributes:
        repository: Where it goes.
        files: The files, with their sizes in bytes.
        url: Where it is; None after a dry run.

    Example:
        >>> upload = mg.origin.push(mg.run("recipe.yml", "out/"), "my-org/merged", dry_run=True)
        >>> "model.safetensors" in upload.files
        True
    """

    repository: str
    files: dict[str, int]
    url: str | None = None


def push(
    directory: str | os.PathLike[str],
    repository: str,
    *,
    private: bool = False,
    revision: str | None = None,
    check: bool = True,
    dry_run: bool = False,
) -> Upload:
    """Upload an output to the hub, after comparing it with its lock file.

    What is uploaded is what the lock file lists, the card and the lock file itself: no stray file goes along. The hub's
    own login is used; this function neither takes a token nor shows one.

    Args:
        directory: The output.
        repository: `owner/name` on the hub; it is created if it does not exist.
        private: Create it private.
        revision: The branch to upload to; by default the main one.
        check: Compare every tensor with the lock file before anything is uploaded.
        dry_run: Only say what would be uploaded; needs no network.

    Returns:
        What was uploaded, or would be.

    Raises:
        InputError: If the output is not what its lock file says, or `repository` is not a name.
        MerganserError: If the hub refuses.

    Example:
        >>> mg.origin.push(mg.run("recipe.yml", "out/"), "my-org/merged", dry_run=True).repository
        'my-org/merged'
    """
    if not HUB_ID.fullmatch(repository) or "@" in repository:
        raise InputError(f"{repository!r} is not the name of a repository; expected owner/name")
    place = Path(directory)
    if place.suffix in SINGLE:
        raise InputError(f"{place}: only directories are uploaded: a single file has no card, config or tokenizer")
    lock = read_lock(directory)
    if check and (problems := verify(place).problems):
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise InputError(f"{place} differs from its lock file: {problems[0]}{more}; nothing was uploaded")
    names = sorted({*lock.outputs, *lock.files, LOCK_FILE, CARD})
    files = {name: (place / name).stat().st_size for name in names if (place / name).is_file()}
    if dry_run:
        return Upload(repository, files)
    hub: Any = require("huggingface_hub", "hf")
    try:
        hub.create_repo(repository, private=private, exist_ok=True)
        hub.upload_folder(
            repo_id=repository,
            folder_path=str(place),
            allow_patterns=[_literal(name) for name in files],
            revision=revision,
            commit_message="Upload a model merged with merganser",
        )
    except Exception as error:  # the hub client raises many kinds of errors
        reason = _SECRET.sub("…", first_line(error))
        raise MerganserError(f"{repository}: the upload failed: {reason}") from None
    return Upload(repository, files, f"{hub.constants.ENDPOINT}/{repository}")


def _literal(name: str) -> str:
    """Return a glob that matches only this name."""
    return re.sub(r"([*?\[])", r"[\1]", name)
