"""`merganser.lock.json`: what an output was made from, and digests to verify it.

The lock file of a directory lies in it, that of a file `OUT.safetensors` beside it as `OUT.safetensors.lock.json`.

    {"format": 1, "digest": "sha256", "versions": {…}, "fingerprint": "…",
     "recipe": {…},                                  the recipe with everything resolved, or null
     "models": [{"label": "math", "kind": "model", "licence": "mit", "files": ["math/model.safetensors"]}, …],
     "sources": {"math/model.safetensors": {"size": 1, "tensors": {"w": "2c26b4…"}}},
     "headers": {"model.safetensors": "9f86d0…"},     what stands before the weights, by SHA-256
     "outputs": {"model.safetensors": {"w": "fcde2b…"}},
     "files": {"config.json": "44136f…"}}            everything else that was written, by SHA-256

Digests are of the stored bytes; names, dtypes and shapes of outputs are in the headers. The file does not depend on
when, where or by how many workers it was written: the same models, recipe and versions give the same file. The card is
not included, since users edit it.
"""

from __future__ import annotations

import json
import os.path
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from merganser import __version__
from merganser.checkpoints.base import Checkpoint, View
from merganser.checkpoints.cards import read_licence
from merganser.checkpoints.digests import digest_bytes, digest_file
from merganser.checkpoints.kinds import is_adapter, is_library
from merganser.checkpoints.references import exists, is_remote, parts

if TYPE_CHECKING:
    from merganser.engine.layout import Shard
    from merganser.engine.merge import Merge
    from merganser.engine.plan import Model
    from merganser.engine.sinks import Digests

LOCK_FILE = "merganser.lock.json"
FORMAT = 1
CARD = "README.md"
#: Suffixes of outputs that are one file of weights.
SINGLE = (".safetensors", ".gguf")
#: Largest merge, in bytes read and written, with SHA-256 digests by default; they take less than a second.
CHEAP = 1_000_000_000
_HEX = re.compile("[0-9a-f]{32}|[0-9a-f]{64}")
_SNAPSHOT = re.compile(r"models--(.+?)--(.+)")


def lock_path(out: Path) -> Path:
    """Return where the lock file of an output is: in a directory, or beside a file."""
    return out.with_name(f"{out.name}.lock.json") if out.suffix in SINGLE else out / LOCK_FILE


def choose_digest(merge: Merge) -> str:
    """Return SHA-256 if it costs little compared with the merge, else xxh3."""
    plan = merge.plan
    read = sum(
        merge.sources[source.model].spec(source.name).nbytes for output in plan.outputs for source in output.reads
    )
    elsewhere = any(is_remote(part) for model in plan.models for part in parts(model.path or ""))
    return "sha256" if elsewhere or read + plan.bytes_out <= CHEAP else "xxh3_128"


def are_digests(value: object) -> TypeGuard[dict[str, str]]:
    """Return whether a value read from a file maps names to digests."""
    return isinstance(value, dict) and all(isinstance(each, str) and _HEX.fullmatch(each) for each in value.values())


@dataclass(frozen=True)
class Origin:
    """The content of a merge's lock file besides its digests.

    Attributes:
        merge: The merge.
        fingerprint: The fingerprint of the plan and its sources, independent of their location.
        digest: The algorithm of the digests.
        recipe: The resolved recipe as a document, if there is one.
    """

    merge: Merge
    fingerprint: str
    digest: str
    recipe: Mapping[str, Any] | None = None

    def render(
        self,
        directory: Path,
        shards: Sequence[Shard],
        written: Mapping[str, str],
        read: Digests,
        named: Mapping[str, str],
    ) -> bytes:
        """Return the lock file of a directory that is otherwise complete.

        Args:
            directory: The directory.
            shards: Its files of weights.
            written: The digests of the outputs by name.
            read: The digests of the stored tensors that were read.
            named: Files of weights that will have another name.
        """
        ancestry = Ancestry(read)
        models = [ancestry.describe(*each) for each in zip(self.merge.plan.models, self.merge.sources, strict=True)]
        if models[0].get("made_of") == models[1:]:
            models = models[1:]  # the first model of a quantised merge is the unquantised merge
        finals = {named.get(shard.file, shard.file): shard for shard in shards}
        lock = LockContent(
            self.digest,
            self.fingerprint,
            {"recipe": self.recipe, "models": models, "sources": dict(sorted(ancestry.files.items()))},
            {file: digest_bytes(shard.header, "sha256") for file, shard in finals.items()},
            {file: {name: written[name] for name in sorted(shard.offsets)} for file, shard in finals.items()},
        )
        return lock.render(directory, [shard.file for shard in shards])


@dataclass(frozen=True)
class LockContent:
    """The content of a lock file besides versions and the files beside the weights.

    Attributes:
        digest: The algorithm of the digests of tensors.
        fingerprint: Tells what was made of what and how.
        origin: The entries on recipe, models and sources.
        headers: The SHA-256 of what stands before the weights, by the names that files of weights will have.
        outputs: The digests of tensors, by the same names.
    """

    digest: str
    fingerprint: str
    origin: Mapping[str, Any]
    headers: Mapping[str, str]
    outputs: Digests

    def render(self, directory: Path, weights: Collection[str]) -> bytes:
        """Return the lock file of a directory that is otherwise complete; `weights` are the files of weights in it."""
        others = (str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())
        left_out = {*weights, CARD, LOCK_FILE}
        lock = {
            "format": FORMAT,
            "digest": self.digest,
            "versions": {"merganser": __version__, **{name: version(name) for name in ("torch", "numpy")}},
            "fingerprint": self.fingerprint,
            **self.origin,
            "headers": self.headers,
            "outputs": self.outputs,
            "files": {name: digest_file(directory / name) for name in sorted(others) if name not in left_out},
        }
        return (json.dumps(lock, indent=1, ensure_ascii=False) + "\n").encode()


class Ancestry:
    """The files that were read, under names that reveal nothing about the machine."""

    def __init__(self, read: Digests) -> None:
        self._read = read
        self._names: dict[str, str] = {}
        self.files: dict[str, dict[str, Any]] = {}

    def describe(self, model: Model, source: Checkpoint) -> dict[str, Any]:
        """Return what is known about a model: its files and its own origin."""
        plain = source
        while isinstance(plain, View) and model.plan is not None:
            plain = plain.source
        if model.plan is not None and isinstance(inner := getattr(plain, "sources", None), tuple):
            made = [self.describe(*each) for each in zip(model.plan.models, inner, strict=True)]
            methods = sorted({output.method for output in model.plan.outputs if not output.copies})
            return {"label": model.label, "kind": "merge", "methods": methods, "made_of": made}
        homes: dict[Path, list[Path]] = {}
        for file in source.files():
            homes.setdefault(_home(file, source.directory), []).append(file)
        remote = {part: place for part in parts(model.label) if is_remote(part) for place in [_small_files(part)]}
        streamed = [self._stream(part, place) for part, place in remote.items() if place not in homes]
        if not homes and len(streamed) == 1:
            return streamed[0]
        if not homes and not streamed:
            return {"label": model.label, "kind": "memory", "files": self._in_memory(model.label, source)}
        if len(homes) == 1 and not streamed:
            ((home, files),) = homes.items()
            return self._directory(model.label, home, files)
        named = {Path(os.path.expanduser(part)).resolve(): part for part in parts(model.label) if exists(part)}
        named |= {place.resolve(): part for part, place in remote.items()}
        made = streamed + [
            self._directory(named.get(home.resolve()) or _hub(home).get("repository") or home.name, home, files)
            for home, files in homes.items()
        ]
        return {"label": model.label, "kind": "view", "made_of": made}

    def _stream(self, url: str, place: Path) -> dict[str, Any]:
        """Describe a model whose weights are remote; `place` has its other files."""
        used = [file for file in self._read if file == url or file.startswith(f"{url.rstrip('/')}/")]
        for file in used:
            self.files[file] = {"tensors": dict(sorted(self._read[file].items()))}
        owner, _, name = url.removeprefix("hf://").partition("/")
        repository, _, revision = f"{owner}/{name.partition('/')[0]}".partition("@")
        hub = {"repository": repository, **({"revision": revision} if revision else {})}
        return self._about(url, place) | (hub if url.startswith("hf://") else {}) | {"files": sorted(used)}

    def _directory(self, label: str, home: Path, files: Iterable[Path]) -> dict[str, Any]:
        used = [file for file in dict.fromkeys(files) if os.path.abspath(file) in self._read]
        return (
            self._about(label, home) | _lock_beside(used) | {"files": [self._name(label, home, file) for file in used]}
        )

    def _about(self, label: str, home: Path) -> dict[str, Any]:
        node: dict[str, Any] = {"label": label, "kind": _kind(home), **_hub(home)}
        if (licence := read_licence(home)) is not None:
            node["licence"] = licence
        if (home / LOCK_FILE).is_file():
            node["lock"] = digest_file(home / LOCK_FILE)
        return node

    def _name(self, label: str, home: Path, file: Path) -> str:
        """Record a file under the name of its model, once; return its name."""
        if (place := str(file)) not in self._names:
            inside = file.relative_to(home).as_posix()
            stem = label if label.endswith(inside) else f"{label}/{inside}"
            name, number = stem, 1
            while name in self.files:
                number += 1
                name = f"{stem} ({number})"
            self._names[place] = name
            blob = file.resolve().name if file.is_symlink() else ""
            known = {"sha256": blob} if re.fullmatch("[0-9a-f]{64}", blob) else {}
            tensors = dict(sorted(self._read[os.path.abspath(file)].items()))
            self.files[name] = {"size": file.stat().st_size, **known, "tensors": tensors}
        return self._names[place]

    def _in_memory(self, label: str, source: Checkpoint) -> list[str]:
        tensors = self._read.get(source.label)
        if tensors is None:
            return []
        self.files[label] = {"size": sum(source.spec(name).nbytes for name in tensors), "tensors": dict(tensors)}
        return [label]


def _lock_beside(files: Sequence[Path]) -> dict[str, str]:
    """Return the digest of the lock file of a model that is one file."""
    lock = lock_path(files[0]) if len(files) == 1 else None
    return {"lock": digest_file(lock)} if lock is not None and lock.is_file() else {}


def _small_files(url: str) -> Path:
    """Return where the small files of a remote model were stored when it was opened."""
    from merganser.checkpoints.remote.models import fetch_small_files

    return fetch_small_files(url.rpartition("/")[0] if url.endswith(".safetensors") else url.rstrip("/"))


def _home(file: Path, directory: Path | None) -> Path:
    """Return the directory of the model that a file of weights belongs to."""
    for above in (file.parent, file.parent.parent):
        if above == directory or is_library(above):
            return above
    return file.parent


def _kind(home: Path) -> str:
    return "adapter" if is_adapter(home) else "library" if is_library(home) else "model"


def _hub(home: Path) -> dict[str, str]:
    """Return the repository and revision of a snapshot in the hub's cache."""
    for above in (home, *home.parents):
        found = _SNAPSHOT.fullmatch(above.parent.parent.name)
        if above.parent.name == "snapshots" and found is not None:
            return {"repository": f"{found[1]}/{found[2]}", "revision": above.name}
    return {}
