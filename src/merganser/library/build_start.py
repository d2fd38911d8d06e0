"""The first steps of a build: check the directory, copy the base, write the first manifest."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from merganser.checkpoints.base import Checkpoint
from merganser.checkpoints.dtypes import Element
from merganser.checkpoints.opening import open as open_checkpoint
from merganser.engine.directories import check_writable
from merganser.errors import InputError
from merganser.library import storage
from merganser.library.bases import main_dtype, weights_checksum
from merganser.library.manifest import FILE, LOCK, SHARED_FILE, Manifest
from merganser.library.storage import FACTOR_DTYPES


def find_interrupted_build(directory: Path, wanted: Manifest) -> Manifest | None:
    """Return the manifest of an interrupted build of the same library, if any; refuse anything else in the
    directory.
    """
    check_writable(directory, directory)
    present = set(os.listdir(directory)) if os.path.isdir(directory) else set()
    if FILE not in present:
        begun = {"experts", LOCK}  # left by a build that was interrupted before its manifest
        if begun <= present:
            begun |= {f"{LOCK}.owner", "base", "base.partial", ".base.lock", SHARED_FILE}
            begun |= {f"{FILE}.partial", f"{SHARED_FILE}.partial"}
        if present - begun or ("experts" in present and any((directory / "experts").iterdir())):
            raise InputError(f"{directory}: exists and is not an expert library; choose another path")
        return None
    found = Manifest.read(directory)
    if not found.pending:
        raise InputError(f"{directory}: is a finished library; use `add` for another expert, or another path")
    unlike = [
        what
        for what, ours, theirs in (
            ("base", wanted.source_fingerprint, found.source_fingerprint),
            ("place of the base", wanted.base, found.base),
            ("dtype", wanted.dtype, found.dtype),
            ("rule for ranks", wanted.policy, found.policy),
            ("experts", list_fingerprints(wanted), list_fingerprints(found)),
        )
        if ours != theirs
    ]
    if unlike:
        raise InputError(f"{directory}: a build with another {unlike[0]} was interrupted here; remove it first")
    return found


def make_directory(directory: Path) -> None:
    try:
        storage.DISK.make_directory(directory / "experts")
    except OSError as error:
        raise InputError(f"{directory}: cannot be created: {error.strerror}") from None


def begin_build(directory: Path, wanted: Manifest, base: Checkpoint) -> Manifest:
    """Write and return the manifest of a new library, after copying the base if requested."""
    if wanted.base_copied:
        # Continues an unfinished copy, keeps a finished one, and refuses anything else.
        from merganser.recipes.saving import save

        base = open_checkpoint(save(base, directory / "base", resume=True, disk=storage.DISK))
        wanted = replace(wanted, base_fingerprint=base.fingerprint())
    wanted = replace(wanted, base_sha256=weights_checksum(base))
    wanted.write(directory)
    return wanted


def list_fingerprints(manifest: Manifest) -> dict[str, str]:
    done = {name: record.fingerprint for name, record in manifest.experts.items()}
    return done | {name: plan.fingerprint for name, plan in manifest.pending.items()}


def factor_dtype(base: Checkpoint) -> str:
    name = Element.of(main_dtype(base)).name
    return name if name in FACTOR_DTYPES else "float32"
