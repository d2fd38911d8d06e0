"""The directory that survives the server: the token, and the jobs."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from merganser.errors import InputError


def state_directory(directory: Path) -> Path:
    """Return the directory for jobs and the token, made for its owner alone.

    Raises:
        InputError: If it cannot be made.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{directory}: cannot keep the studio's state there: {error.strerror}") from None
    return directory


def read_token(state: Path) -> str:
    """Return the token of a state directory, made on first use: a page that is open stays so over a restart."""
    file = state / "token"
    if not file.is_file():
        handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(handle, "w") as written:
            written.write(secrets.token_urlsafe(24))
    return file.read_text(encoding="ascii").strip()
