"""The directories that the studio may access; everything else is refused."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from merganser.checkpoints.kinds import ADAPTER_CONFIG, is_adapter
from merganser.checkpoints.references import parts
from merganser.confine import confine
from merganser.errors import CheckpointError, InputError
from merganser.excerpts import shorten
from merganser.studio.files import read_object

if TYPE_CHECKING:
    from merganser.checkpoints.base import Checkpoint
    from merganser.engine.merge import Merge
    from merganser.recipes.schema import Recipe

#: The inode, size and time of every file that a checkpoint was opened from; None for a file that is missing.
_Stamps: TypeAlias = "dict[Path, tuple[int, int, int] | None]"


#: The longest name that file systems allow, in bytes.
_LONGEST = 255


class Outside(InputError):
    """A path outside the directories of the studio."""


class Roots:
    """An allow-list of directories.

    Args:
        directories: The directories; relative paths are inside the first.

    Raises:
        InputError: If one of them is no directory.

    Example:
        >>> Roots(["models"]).find("llama/config.json")
    """

    def __init__(self, directories: Sequence[str | os.PathLike[str]]) -> None:
        for directory in directories:
            if not Path(directory).is_dir():
                raise InputError(f"{directory}: no such directory")
        self.directories = tuple(Path(directory).resolve() for directory in directories)
        self._opened: dict[str, tuple[Checkpoint, _Stamps]] = {}

    @property
    def home(self) -> Path:
        """The directory that relative paths refer to."""
        return self.directories[0]

    def find(self, text: str) -> Path:
        """Return the path that a text means, links followed; nothing needs to exist there.

        Raises:
            Outside: If it leads out of every directory.
        """
        given = Path(os.path.expanduser(text))
        if "\0" in text or any(len(os.fsencode(part)) > _LONGEST for part in given.parts):
            raise InputError(
                f"{shorten(text, 40, 'start')!r} is not the name of a file: names have at most {_LONGEST} bytes"
            )
        for root in self.directories if given.is_absolute() else [self.home]:
            name = str(given.relative_to(root)) if given.is_relative_to(root) else str(given)
            if name == ".":
                return root
            try:
                return confine(root, name, "path").resolve()
            except CheckpointError:
                continue
        raise Outside(f"{text}: outside of {', '.join(map(str, self.directories))}, which the studio was opened on")

    def show(self, path: Path) -> str:
        """Return a path as the page shows and sends it: relative to the first directory if it is in there."""
        return str(path.relative_to(self.home)) if path.is_relative_to(self.home) else str(path)

    def locate(self, reference: str) -> str:
        """Return a checkpoint reference (`model`, `model+adapter`) with absolute paths inside the directories."""
        return "+".join(map(str, self._split_reference(reference)))

    def _split_reference(self, reference: str) -> list[Path]:
        """Return the paths of a reference. The base that an adapter names is looked for where jobs look for it, in the
        first directory.
        """
        found = [self.find(part) for part in parts(reference, self._exists)]
        base = _find_base(found[0])
        return [self.find(base), *found] if base and self._exists(base) else found

    def _exists(self, part: str) -> bool:
        try:
            return self.find(part).exists()
        except Outside:
            return False

    def open(self, reference: str) -> Checkpoint:
        """Open a checkpoint inside the directories; one whose files are unchanged is opened once."""
        from merganser.checkpoints.opening import open as open_checkpoint

        found = self._split_reference(reference)
        place = "+".join(map(str, found))
        known = self._opened.get(place)
        if known is None or known[1] != _stamp(known[1]):
            fresh = open_checkpoint(place)
            for file in fresh.files():
                self.find(str(file))
            paths = [path for part in found for path in _list_content(part)]
            self._opened[place] = known = fresh, _stamp([*paths, *fresh.files()])
        return known[0]

    def load(self, written: str | Mapping[str, Any], beside: str | None = None) -> Recipe:
        """Read a recipe.

        Args:
            written: The text of the recipe, or its document.
            beside: The directory that relative paths are looked for in first.
        """
        from merganser.recipes.loading import load

        root = self.find(beside) if beside else self.home
        if isinstance(written, str):
            written = written if "\n" in written else f"{written}\n"
        recipe = load(written, root)
        self._check(recipe)
        return recipe

    def prepare(self, written: str | Mapping[str, Any], beside: str | None = None) -> Merge:
        """Return the merge that a recipe asks for; whatever it names is opened here, and refused if it is outside."""
        from merganser.recipes.planning import prepare

        return prepare(self.load(written, beside), self.open)

    def _check(self, recipe: Recipe) -> None:
        """Refuse a chat template, and recipes inside a recipe, that are read from elsewhere."""
        from merganser.recipes.references import locate

        if (template := recipe.output.chat_template) is not None and "{" not in template:
            self.find(locate(template, recipe.root))
        for entry in recipe.entries():
            if entry.recipe is not None:
                if entry.recipe.root is not None:
                    self.find(str(entry.recipe.root))
                self._check(entry.recipe)


def _find_base(path: Path) -> str | None:
    """Return the base that the directory of an adapter names; None if it is no adapter."""
    if not is_adapter(path):
        return None
    base = read_object(path / ADAPTER_CONFIG).get("base_model_name_or_path")
    return base if isinstance(base, str) else None


def _list_content(path: Path) -> list[Path]:
    """Return a path, and what is in it if it is a directory."""
    return [path, *path.iterdir()] if path.is_dir() else [path]


def _stamp(paths: Iterable[Path]) -> _Stamps:
    """Return what changes when a file is written or replaced, or a directory gets another file, for every path."""
    return {path: _read_stamp(path) for path in paths}


def _read_stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
