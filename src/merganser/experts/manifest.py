"""What a library says of itself: one JSON file, replaced whole, never edited in place."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from merganser.errors import CheckpointError

FILE = "library.json"
FORMAT = "merganser-experts"
VERSION = 1


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
        content = {"format": FORMAT, "version": VERSION, **asdict(self)}
        partial = directory / f"{FILE}.partial"
        with partial.open("w", encoding="utf-8") as file:
            json.dump(content, file, indent=2)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        partial.rename(directory / FILE)

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        path = directory / FILE
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CheckpointError(f"{directory}: not an expert library: it has no {FILE}") from None
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: cannot be read: {error}") from None
        try:
            if content.pop("format") != FORMAT:
                raise CheckpointError(f"{path}: not the manifest of an expert library")
            if content.pop("version") != VERSION:
                raise CheckpointError(f"{path}: written by another version of the library format")
            experts = {name: ExpertRecord(**record) for name, record in content.pop("experts").items()}
            return cls(**content, experts=experts)
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path}: damaged: {error}") from None
