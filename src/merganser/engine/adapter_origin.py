"""The lock file of an adapter: like that of a merge, for what is computed without a plan."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from merganser.checkpoints.base import Checkpoint
from merganser.checkpoints.digests import digest_bytes
from merganser.checkpoints.reads import StoredRead, file_of
from merganser.checkpoints.safetensors_file import SafetensorsFile
from merganser.checkpoints.weight_files import read_header
from merganser.engine.origin import CHEAP, LOCK_FILE, Ancestry, LockContent
from merganser.engine.plan import Model


class AdapterOrigin:
    """What an adapter is made of: its sources by name, and what of them was read (see `checkpoints.reads`).

    Args:
        made_by: The function that makes it, with its settings.
        sources: What it is made of, by name.
    """

    def __init__(self, made_by: Mapping[str, Any], sources: Iterable[tuple[str, Checkpoint]]) -> None:
        self.made_by = dict(made_by)
        self.sources = list(sources)
        self.reads: dict[StoredRead, None] = {}

    def lock(self, directory: Path, weights: str) -> None:
        """Write the lock file of a directory that is otherwise complete; `weights` is its file of weights."""
        size = sum(checkpoint.spec(name).nbytes for checkpoint, name in self.reads)
        algorithm = "sha256" if size <= CHEAP else "xxh3_128"
        read: dict[str, dict[str, str]] = {}
        for checkpoint, name in self.reads:
            read.setdefault(file_of(checkpoint), {})[name] = checkpoint.digest(name, algorithm)
        ancestry = Ancestry(read)
        models = [ancestry.describe(Model(label), source) for label, source in self.sources]
        made = SafetensorsFile(directory / weights)
        prints = [self.made_by, *(source.fingerprint() for _, source in self.sources)]
        origin = {"recipe": None, "made_by": self.made_by, "models": models}
        lock = LockContent(
            algorithm,
            hashlib.sha256(json.dumps(prints).encode()).hexdigest(),
            origin | {"sources": dict(sorted(ancestry.files.items()))},
            headers={weights: digest_bytes(read_header(made), "sha256")},
            outputs={weights: {name: made.digest(name, algorithm) for name in sorted(made.names())}},
        )
        (directory / LOCK_FILE).write_bytes(lock.render(directory, (weights,)))
