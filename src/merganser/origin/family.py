"""`trace`: find what an output descends from, by the lock files of its sources."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from merganser.checkpoints.digests import digest_file
from merganser.engine.origin import lock_path
from merganser.errors import CheckpointError
from merganser.origin.licences import describe_terms, find_conflicts
from merganser.origin.lock_file import Ancestor, read_lock

#: Largest depth of nested merges that is followed.
_DEEPEST = 64


@dataclass(frozen=True)
class FamilyTree:
    """An output with everything it descends from.

    Attributes:
        root: The output; `root.walk()` yields its ancestors.
        notes: What could not be followed.

    Example:
        >>> family = mg.origin.trace(mg.run("recipe.yml", "out/"))
        >>> [ancestor.label for ancestor in family.root.made_of]
        ['base', 'math', 'code']
    """

    root: Ancestor
    notes: tuple[str, ...] = ()

    @property
    def licences(self) -> dict[str, tuple[str, ...]]:
        """Return licences -> the ancestors under them, for those with their own files; `unknown` if there is none."""
        found: dict[str, dict[str, None]] = {}
        for each in self.root.walk():
            if each.files and not each.made_of:
                found.setdefault(each.licence or "unknown", {})[each.label] = None
        return {licence: tuple(labels) for licence, labels in sorted(found.items())}

    @property
    def conflicts(self) -> list[str]:
        """Return the conflicts between licences, one sentence each."""
        return find_conflicts(set(self.licences) - {"unknown"})

    @property
    def terms(self) -> list[str]:
        """Return what the licences require of those who share the output."""
        unknown = ["unknown: ask the authors before you share the output"] if "unknown" in self.licences else []
        return [*describe_terms(set(self.licences) - {"unknown"}), *unknown]

    def lines(self) -> list[str]:
        """Return the tree as text, one line per ancestor."""
        return [describe(self.root), *_branches(self.root, "")]


def describe(ancestor: Ancestor) -> str:
    """Return an ancestor in one line."""
    hub = f"{ancestor.repository}@{(ancestor.revision or '')[:12]}" if ancestor.repository else ""
    how = "a view" if ancestor.kind == "view" else ancestor.kind
    if ancestor.methods:
        how = f"{how} by {', '.join(ancestor.methods)}"
    parts = [how, hub if hub and hub.partition("@")[0] != ancestor.label else hub.partition("@")[2], ancestor.licence]
    return _printable(f"{ancestor.label} ({', '.join(part for part in parts if part)})")


def _branches(ancestor: Ancestor, indent: str) -> list[str]:
    lines = []
    for number, each in enumerate(ancestor.made_of, 1):
        last = number == len(ancestor.made_of)
        lines.append(f"{indent}{'└── ' if last else '├── '}{describe(each)}")
        lines += _branches(each, indent + ("    " if last else "│   "))
    return lines


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else "�" for letter in text)


def trace(directory: str | os.PathLike[str], *, root: str | os.PathLike[str] | None = None) -> FamilyTree:
    """Follow the lock files of an output and of its sources, as far as they exist.

    Args:
        directory: The output.
        root: Where relative paths of models start; by default the working directory.

    Returns:
        The family tree.

    Raises:
        CheckpointError: If the output has no lock file, or it is damaged.

    Example:
        >>> mg.origin.trace(mg.run("recipe.yml", "out/")).licences
        {'unknown': ('base', 'math', 'code')}
    """
    notes: list[str] = []
    lock = read_lock(directory)
    methods = _methods(lock.recipe)
    start = Path(root) if root is not None else Path()
    made = tuple(_follow(each, start, (), notes) for each in lock.models)
    return FamilyTree(Ancestor(Path(directory).resolve().name, "merge", made, methods), tuple(dict.fromkeys(notes)))


def _follow(ancestor: Ancestor, root: Path, over: tuple[str, ...], notes: list[str]) -> Ancestor:
    """Return an ancestor with the ancestors in its own lock file."""
    if ancestor.lock is None or ancestor.lock in over or len(over) > _DEEPEST:
        made = tuple(_follow(each, root, over, notes) for each in ancestor.made_of)
        return replace(ancestor, made_of=made)
    place = root / os.path.expanduser(ancestor.label)
    file = lock_path(place)
    try:
        if not file.is_file():
            raise CheckpointError(f"{ancestor.label}: was merged itself, but its {file.name} is missing")
        if digest_file(file) != ancestor.lock:
            raise CheckpointError(f"{ancestor.label}: its {file.name} has changed since it was merged")
        lock = read_lock(place)
    except (CheckpointError, OSError) as error:
        notes.append(str(error))
        return ancestor
    made = tuple(_follow(each, root, (*over, ancestor.lock), notes) for each in lock.models)
    return replace(ancestor, kind="merge", made_of=made, methods=_methods(lock.recipe))


def _methods(recipe: object) -> tuple[str, ...]:
    """Return the methods that a resolved recipe uses at its top level."""
    method = recipe.get("method") if isinstance(recipe, dict) else None
    return (method,) if isinstance(method, str) else ()
