"""Read lock files. They may come from anyone, so everything in them is checked before it is used."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from merganser.checkpoints.digests import DIGESTS
from merganser.checkpoints.json_file import read_object
from merganser.engine.origin import FORMAT, are_digests, lock_path
from merganser.errors import CheckpointError

_KINDS = ("model", "adapter", "library", "merge", "view", "memory")


@dataclass(frozen=True)
class Ancestor:
    """A model that an output was made from.

    Attributes:
        label: What the recipe called it.
        kind: `model`, `adapter` or `library` for what lies in a directory, `merge` or `view` (a model with an adapter,
            an expert of a library) for what was computed from others, `memory` for what a program held.
        made_of: What it was made of.
        methods: The merging methods, of a merge.
        files: The files that were read, as the lock file calls them.
        licence: What its card said, as the hub spells it.
        repository: The hub's repository.
        revision: The commit there.
        lock: The SHA-256 of its own lock file.

    Example:
        >>> mg.origin.read_lock(mg.run("recipe.yml", "out/")).models[1].label
        'math'
    """

    label: str
    kind: str = "model"
    made_of: tuple[Ancestor, ...] = ()
    methods: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    licence: str | None = None
    repository: str | None = None
    revision: str | None = None
    lock: str | None = None

    def walk(self) -> Iterator[Ancestor]:
        """Yield this model and everything it was made from."""
        yield self
        for each in self.made_of:
            yield from each.walk()


@dataclass(frozen=True)
class LockFile:
    """The content of a `merganser.lock.json`.

    Attributes:
        digest: The algorithm of the digests of tensors.
        fingerprint: That of the plan and its sources.
        versions: The versions of the software that wrote it.
        recipe: The resolved recipe, if the output was made by one.
        models: What the output was made of.
        sources: Files that were read -> tensors -> digests.
        headers: Files of weights -> the SHA-256 of what stands before the weights.
        outputs: Files of weights -> tensors -> digests.
        files: The other files -> their SHA-256.

    Example:
        >>> lock = mg.origin.read_lock(mg.run("recipe.yml", "out/"))
        >>> sorted(lock.outputs)
        ['model.safetensors']
    """

    digest: str
    fingerprint: str
    versions: Mapping[str, str]
    recipe: Mapping[str, Any] | None
    models: tuple[Ancestor, ...]
    sources: Mapping[str, Mapping[str, str]]
    headers: Mapping[str, str]
    outputs: Mapping[str, Mapping[str, str]]
    files: Mapping[str, str]


def read_lock(directory: str | os.PathLike[str]) -> LockFile:
    """Read the lock file of an output.

    Args:
        directory: The output: a directory, or a single file of weights.

    Returns:
        What the lock file says.

    Raises:
        CheckpointError: If there is none, or it is damaged.

    Example:
        >>> mg.origin.read_lock(mg.run("recipe.yml", "out/")).digest
        'sha256'
    """
    if not Path(directory).exists():
        raise CheckpointError(f"{directory}: no such file or directory")
    file = lock_path(Path(directory))
    if not file.is_file():
        raise CheckpointError(f"{directory}: has no {file.name}, so nothing is known of its origin")
    return parse_lock(read_object(file, finite=True), str(file))


def parse_lock(data: Mapping[str, Any], where: str) -> LockFile:
    """Return the content of a lock file from its JSON object, or raise an error."""

    def expect(holds: bool, what: str) -> None:
        if not holds:
            raise CheckpointError(f"{where}: {what}; the file is damaged, or not a lock file of merganser")

    written = data.get("format")
    if isinstance(written, int) and written > FORMAT:
        raise CheckpointError(f"{where}: written in format {written} by a newer merganser; this one reads {FORMAT}")
    expect(written == FORMAT, "has no format")
    digest, fingerprint, recipe = data.get("digest"), data.get("fingerprint"), data.get("recipe")
    expect(isinstance(digest, str) and digest in DIGESTS, f"digest is none of {', '.join(DIGESTS)}")
    expect(isinstance(fingerprint, str), "fingerprint is not a text")
    expect(recipe is None or isinstance(recipe, dict), "recipe is not an object")
    versions, sources, headers, outputs, files, models = (
        data.get(key) for key in ("versions", "sources", "headers", "outputs", "files", "models")
    )
    expect(isinstance(versions, dict) and all(isinstance(v, str) for v in versions.values()), "versions are not texts")
    expect(are_digests(files), "files have no digests")
    expect(isinstance(outputs, dict) and all(map(are_digests, outputs.values())), "outputs have no digests")
    expect(are_digests(headers) and headers.keys() == (outputs or {}).keys(), "headers of outputs have no digests")
    expect(
        isinstance(sources, dict)
        and all(isinstance(each, dict) and are_digests(each.get("tensors")) for each in sources.values()),
        "sources have no digests",
    )
    expect(isinstance(models, list), "models are not a list")
    return LockFile(
        str(digest),
        str(fingerprint),
        versions or {},
        recipe,
        tuple(_read_ancestor(each, expect) for each in models or ()),
        {name: each["tensors"] for name, each in (sources or {}).items()},
        headers or {},
        outputs or {},
        files or {},
    )


def _read_ancestor(data: Any, expect: Any) -> Ancestor:
    expect(isinstance(data, dict) and isinstance(data.get("label"), str), "a model has no label")
    expect(data.get("kind") in _KINDS, f"the model {data['label'][:80]!r} is of an unknown kind")
    found: dict[str, Any] = {key: data.get(key) for key in ("licence", "repository", "revision", "lock")}
    wrong = next((key for key, each in found.items() if not isinstance(each, str | None)), "")
    expect(not wrong, f"the {wrong} of a model is not a text")
    for key in ("methods", "files"):
        listed = data.get(key, [])
        expect(isinstance(listed, list) and all(isinstance(each, str) for each in listed), f"{key} are not texts")
        found[key] = tuple(listed)
    made = data.get("made_of", [])
    expect(isinstance(made, list), "made_of is not a list")
    return Ancestor(data["label"], data["kind"], tuple(_read_ancestor(each, expect) for each in made), **found)
