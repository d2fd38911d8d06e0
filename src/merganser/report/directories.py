"""One page over a directory, whatever command left it behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from merganser.errors import InputError
from merganser.experts.manifest import FILE as LIBRARY
from merganser.report import alignments, checkpoints, demonstration, libraries, studies, sweeps
from merganser.report.page import Page


@dataclass(frozen=True)
class Kind:
    """Something a command leaves: what it is called, by what it is known, whether a path is one, and its page."""

    name: str
    sign: str
    recognise: Callable[[Path], bool]
    fill: Callable[[Page, Path, bool], dict[str, Any]]


#: In the order they are asked; of a directory the first that knows it counts.
DIRECTORIES = (
    Kind("Expert library", LIBRARY, lambda path: (path / LIBRARY).is_file(), libraries.fill),
    Kind(
        "Alignment",
        alignments.PERMUTATIONS,
        lambda path: (path / alignments.PERMUTATIONS).is_file(),
        alignments.fill,
    ),
    Kind("Demo", f"{demonstration.FILE} of the demo", demonstration.is_demo, demonstration.fill),
    Kind("Checkpoint", "weights (model*.safetensors, adapter_model.*)", checkpoints.holds_weights, checkpoints.fill),
)
FILES = (
    Kind("Study", "a study (*.sqlite)", studies.is_study, studies.fill),
    Kind("Sweep", "the journal of a sweep (*.sweep.jsonl)", sweeps.is_sweep, sweeps.fill),
)


def report(path: Path, *, check: bool = False) -> tuple[Page, list[dict[str, Any]]]:
    """The page of a directory (or of one study or journal), and what was found in it as plain values.

    In a directory that is nothing by itself, every directory in it is looked at too. `check` reads every weight.
    """
    if not path.exists():
        partial = path.with_name(f"{path.name}.partial")
        unfinished = f"; {partial} is an unfinished merge: --resume continues it" if partial.is_dir() else ""
        raise InputError(f"{path}: no such directory{unfinished}")
    found = list(_found(path))
    if not found and path.is_dir():
        found = [each for inner in sorted(path.iterdir()) if inner.is_dir() for each in _found(inner)]
    if not found:
        looked = ", ".join(kind.sign for kind in (*DIRECTORIES, *FILES))
        raise InputError(f"{path}: nothing to report on, here or one directory down; looked for {looked}")
    alone = len(found) == 1
    page = Page(f"{found[0][0].name}: {found[0][1].resolve().name}" if alone else f"What is in {path.resolve().name}")
    results = []
    for kind, place in found:
        if not alone:
            page.heading(f"{kind.name}: {place.name}")
        results.append({"path": str(place), **kind.fill(page, place, check)})
    return page, results


def _found(path: Path) -> Iterator[tuple[Kind, Path]]:
    """What a path is: one kind of directory at most, and the files of other kinds in it."""
    if path.is_file():
        yield from ((kind, path) for kind in FILES if kind.recognise(path))
        return
    yield from ((kind, path) for kind in [kind for kind in DIRECTORIES if kind.recognise(path)][:1])
    for file in sorted(path.iterdir()):
        if file.is_file():
            yield from ((kind, file) for kind in FILES if kind.recognise(file))
