"""The manifest of a library: one JSON file, replaced atomically by one process at a time."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from merganser import strict_json
from merganser.confine import confine
from merganser.engine.disk import Disk
from merganser.engine.lock import Lock
from merganser.errors import CheckpointError, InputError, MerganserError
from merganser.excerpts import shorten
from merganser.library.codes.catalogue import CHOICES, TensorChoice
from merganser.library.manifest_sections import ManifestSection
from merganser.library.ranks import KINDS, RankPolicy
from merganser.library.storage import FACTOR_DTYPES, write_whole

FILE = "library.json"
LOCK = ".lock"
FORMAT = "merganser-experts"
#: Version 2 has the checksum of the base's weights, and experts may keep convolution kernels as factors. Version 3 has
#: coded tensors, and a part that all experts share.
VERSION = 3
READABLE = (1, 2, 3)
#: The file of the part that all experts share.
SHARED_FILE = "shared.safetensors"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def check_name(name: str) -> None:
    """Check the name of an expert, which becomes the name of a file."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InputError(
            f"{shorten(str(name), 100, 'start')!r} cannot name an expert: use only letters, digits, '.', '_' and '-'"
        )
    if len(name) > 200:
        raise InputError(f"{shorten(name, 100, 'start')!r} cannot name an expert: it has more than 200 letters")


@contextmanager
def lock_library(directory: Path) -> Iterator[None]:
    """Lock the library against changes by others."""
    try:
        lock = Lock(directory, Disk(), directory / LOCK)
    except OSError as error:
        raise InputError(f"{directory}: cannot be changed: {error.strerror}") from None
    try:
        yield
    except OSError as error:
        raise MerganserError(
            f"{directory}: could not be written: {error}; finished parts are kept; run the same again to continue"
        ) from error
    finally:
        lock.release()


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a file that appears, or replaces the previous one, only when it is complete and synced."""
    text = (json.dumps(content, indent=2) + "\n").encode()
    write_whole(path, len(text), lambda write: write(0, memoryview(text)))


def read_json(path: Path, what: str, form: str, versions: Collection[int]) -> ManifestSection:
    """Return the content of a manifest of this format and one of these versions, without these two; `what` describes
    it in messages.
    """
    try:
        content = strict_json.read_json(path)
    except (FileNotFoundError, NotADirectoryError):
        if not path.parent.exists():
            raise CheckpointError(f"{path.parent}: no such directory") from None
        raise CheckpointError(f"{path.parent}: not {what}: it has no {path.name}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None
    if not isinstance(content, dict) or content.pop("format", None) != form:
        raise CheckpointError(f"{path}: not the manifest of {what}")
    version = content.pop("version", None)
    if type(version) is not int or version not in versions:
        raise CheckpointError(f"{path}: {what} written by another version of merganser")
    return ManifestSection(content, str(path))


def expert_file(name: str) -> str:
    """Return where a library keeps an expert, below its directory."""
    return f"experts/{name}.safetensors"


@dataclass(frozen=True)
class ExpertRecord:
    """A finished expert: its file with size and sha256, its origin, and the share of its energy that was kept."""

    file: str
    nbytes: int
    sha256: str
    source: str
    fingerprint: str
    energy: float

    @classmethod
    def read(cls, directory: Path, name: str, record: ManifestSection) -> ExpertRecord:
        """Read the record of the expert `name`, whose file must have the name derived from it."""
        found = cls(
            file=record.text("file"),
            nbytes=record.count("nbytes"),
            sha256=record.text("sha256"),
            source=record.text("source"),
            fingerprint=record.text("fingerprint"),
            energy=record.number("energy"),
        )
        confine(directory, found.file, f"{record.where}: file")
        if found.file != expert_file(name):
            raise record.damaged("file", repr(expert_file(name)), found.file)
        record.done()
        return found


@dataclass(frozen=True)
class StoredFile:
    """The size and checksum of a file of the library."""

    nbytes: int
    sha256: str

    @classmethod
    def read(cls, record: ManifestSection) -> StoredFile:
        found = cls(record.count("nbytes"), record.text("sha256"))
        record.done()
        return found


@dataclass(frozen=True)
class ExpertPlan:
    """How a build will store an expert.

    Attributes:
        fingerprint: The fingerprint of its checkpoint.
        codes: The code of every tensor, as text, in a library of codes.
        room: The bytes of the header of its file, in a library of plain factors.
        ranks: The rank of every tensor there; None for a tensor that is kept whole.
    """

    fingerprint: str
    codes: dict[str, str] | None = None
    room: int = 0
    ranks: dict[str, int | None] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        layout = {"room": self.room, "ranks": self.ranks} if self.codes is None else {"codes": self.codes}
        return {"fingerprint": self.fingerprint, **layout}

    @classmethod
    def read(cls, plan: ManifestSection) -> ExpertPlan:
        fingerprint = plan.text("fingerprint")
        if plan.has("codes"):
            codes = plan.section("codes")
            found = cls(fingerprint, {tensor: codes.text(tensor) for tensor in codes.names()})
            for tensor, text in (found.codes or {}).items():
                try:
                    TensorChoice.parse(text)
                except ValueError:
                    raise codes.damaged(tensor, "a code", text) from None
        else:
            ranks = plan.section("ranks")
            known = {tensor: ranks.optional_count(tensor) for tensor in ranks.names()}
            found = cls(fingerprint, room=plan.count("room"), ranks=known)
        plan.done()
        return found


@dataclass(frozen=True)
class Manifest:
    """The manifest of a library.

    `base` is a path or hub id, or `base` inside the library if it was copied; then there are the fingerprints of both
    original and copy. `base_sha256` is over all weights of the base, None in libraries of version 1. `pending` are
    experts of an unfinished build with their plans. `shared` is the file of the shared part, if any.
    """

    base: str
    base_copied: bool
    base_fingerprint: str
    source_fingerprint: str
    dtype: str
    policy: RankPolicy
    base_sha256: str | None = None
    experts: dict[str, ExpertRecord] = field(default_factory=dict)
    pending: dict[str, ExpertPlan] = field(default_factory=dict)
    shared: StoredFile | None = None

    def with_expert(self, name: str, record: ExpertRecord) -> Manifest:
        pending = {other: plan for other, plan in self.pending.items() if other != name}
        return replace(self, experts=self.experts | {name: record}, pending=pending)

    def without(self, name: str) -> Manifest:
        return replace(self, experts={k: v for k, v in self.experts.items() if k != name})

    def write(self, directory: Path) -> None:
        pending = {name: plan.to_dict() for name, plan in self.pending.items()}
        content = asdict(self) | {"policy": self.policy.to_dict(), "pending": pending}
        write_json(directory / FILE, {"format": FORMAT, "version": VERSION, **content})

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """Read the manifest of the library in `directory` and validate every field."""
        content = read_json(directory / FILE, "an expert library", FORMAT, READABLE)
        found = cls(
            base=content.text("base"),
            base_copied=content.flag("base_copied"),
            base_fingerprint=content.text("base_fingerprint"),
            source_fingerprint=content.text("source_fingerprint"),
            dtype=content.choice("dtype", FACTOR_DTYPES),
            policy=_read_policy(content.section("policy")),
            base_sha256=content.text("base_sha256") if content.has("base_sha256") else None,
            experts={
                name: ExpertRecord.read(directory, name, record)
                for name, record in read_named_sections(content, "experts")
            },
            pending={name: ExpertPlan.read(plan) for name, plan in read_named_sections(content, "pending")},
            shared=StoredFile.read(content.section("shared")) if content.has("shared") else None,
        )
        content.done()
        if found.base_copied:
            confine(directory, found.base, f"{directory / FILE}: base")
        if twice := sorted(found.experts.keys() & found.pending):
            raise CheckpointError(f"{directory / FILE}: damaged: {twice[0]!r} is both finished and pending")
        return found


def read_named_sections(content: ManifestSection, key: str) -> Iterator[tuple[str, ManifestSection]]:
    """Yield the sections below a field, each with the name of an expert."""
    records = content.section(key)
    for name in records.names():
        try:
            check_name(name)
        except InputError as error:
            raise CheckpointError(f"{records.where}: damaged: {error}") from None
        yield name, records.section(name)


def _read_policy(policy: ManifestSection) -> RankPolicy:
    kind, value = policy.choice("kind", KINDS), policy.number("value")
    codes = policy.text("codes") if policy.has("codes") else ""
    if any(code not in CHOICES for code in codes.split()):
        raise policy.damaged("codes", f"some of {', '.join(CHOICES)}", codes)
    policy.done()
    try:
        return RankPolicy(kind, value, tuple(codes.split()))  # type: ignore[arg-type]
    except InputError as error:
        raise CheckpointError(f"{policy.where}: damaged: {error}") from None
