"""What a library says of itself: one JSON file, replaced whole, never edited in place, by one process at a time."""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from merganser import strict_json
from merganser.errors import CheckpointError, InputError

FILE = "library.json"
LOCK = ".lock"
FORMAT = "merganser-experts"
VERSION = 1
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def check_name(name: str) -> None:
    """Names of experts become names of files."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InputError(f"{name!r} cannot name an expert: letters, digits, '.', '_' and '-' only")


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Nobody else changes the library meanwhile. The lock ends with the process that holds it; its file stays."""
    try:
        handle = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise InputError(f"{directory}: cannot be changed: {error.strerror}") from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise InputError(f"{directory}: another process is changing this library; try again when it is done") from None
    try:
        yield
    finally:
        os.close(handle)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """The file appears, or takes the place of the last one, when it is complete and synced."""
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)


def read_json(path: Path, what: str, form: str, version: int) -> dict[str, Any]:
    """The content of a manifest of this form and version, without these two; `what` it belongs to is for messages."""
    try:
        content = strict_json.read_json(path)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{path.parent}: not {what}: it has no {path.name}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None
    if not isinstance(content, dict) or content.pop("format", None) != form:
        raise CheckpointError(f"{path}: not the manifest of {what}")
    if content.pop("version", None) != version:
        raise CheckpointError(f"{path}: {what} written by another version of merganser")
    return content


@dataclass(frozen=True)
class ExpertRecord:
    """A finished expert: its file with size and sha256, where it came from, the share of its energy that was kept."""

    file: str
    nbytes: int
    sha256: str
    source: str
    fingerprint: str
    energy: float


@dataclass(frozen=True)
class Manifest:
    """`base` is a path or hub id, or `base` inside the library when it was copied; then the fingerprint of what was
    copied stands beside that of the copy. `pending` are experts a build has promised and not yet finished, with the
    ranks decided for them."""

    base: str
    base_copied: bool
    base_fingerprint: str
    source_fingerprint: str
    dtype: str
    policy: dict[str, Any]
    experts: dict[str, ExpertRecord] = field(default_factory=dict)
    pending: dict[str, dict[str, Any]] = field(default_factory=dict)

    def with_expert(self, name: str, record: ExpertRecord) -> Manifest:
        pending = {other: plan for other, plan in self.pending.items() if other != name}
        return replace(self, experts=self.experts | {name: record}, pending=pending)

    def without(self, name: str) -> Manifest:
        return replace(self, experts={k: v for k, v in self.experts.items() if k != name})

    def write(self, directory: Path) -> None:
        write_json(directory / FILE, {"format": FORMAT, "version": VERSION, **asdict(self)})

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        path = directory / FILE
        content = read_json(path, "an expert library", FORMAT, VERSION)
        try:
            experts = {name: ExpertRecord(**record) for name, record in content.pop("experts").items()}
            return cls(**content, experts=experts)
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path}: damaged: {error}") from None
