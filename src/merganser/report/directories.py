"""One page about a directory, for the output of any command."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from merganser.errors import InputError
from merganser.library.manifest import FILE as LIBRARY
from merganser.report import (
    alignments,
    autopilots,
    checkpoints,
    demonstration,
    evaluations,
    libraries,
    studies,
    sweeps,
)
from merganser.report.page import Page
from merganser.report.tables import Link


@dataclass(frozen=True)
class Kind:
    """A kind of result: its name, the file that identifies it, a test of a path, and the function that fills its
    page.
    """

    name: str
    sign: str
    recognise: Callable[[Path], bool]
    fill: Callable[[Page, Path, bool], dict[str, Any]]


#: In order of precedence; the first that recognises a directory counts.
DIRECTORIES = (
    Kind("Expert library", LIBRARY, lambda path: (path / LIBRARY).is_file(), libraries.fill),
    Kind(
        "Alignment",
        alignments.PERMUTATIONS,
        lambda path: (path / alignments.PERMUTATIONS).is_file(),
        alignments.fill,
    ),
    Kind("Autopilot", f"{autopilots.FILE} of the autopilot", autopilots.is_decision, autopilots.fill),
    Kind("Demo", f"{demonstration.FILE} of the demo", demonstration.is_demo, demonstration.fill),
    Kind("Checkpoint", "weights (model*.safetensors, adapter_model.*)", checkpoints.holds_weights, checkpoints.fill),
)
STUDY = Kind("Study", "a study (*.sqlite)", studies.is_study, studies.fill)
FILES = (
    STUDY,
    Kind("Sweep", "the journal of a sweep (*.sweep.jsonl)", sweeps.is_sweep, sweeps.fill),
    Kind(
        "Evaluation",
        "the JSON of `merganser evaluate` (*.json)",
        evaluations.is_evaluation,
        evaluations.fill_file,
    ),
)


def report(path: str | os.PathLike[str], *, check: bool = False) -> tuple[Page, list[dict[str, Any]]]:
    """Build the page of a checkpoint, library, alignment, study, sweep or evaluation, or of a directory with several.

    Args:
        path: The directory, or the file of one study, journal or evaluation.
        check: Read every weight and look for NaN, infinite values and zeros.

    Returns:
        The page, and the summaries of everything found as JSON-serialisable values.

    Raises:
        InputError: If there is nothing to report on.

    Example:
        >>> page, found = mg.report.report("math")
        >>> page.write("math.html")
    """
    path = Path(path)
    if not path.exists():
        partial = path.with_name(f"{path.name}.partial")
        unfinished = f"; {partial} is an unfinished merge: resume it first" if partial.is_dir() else ""
        raise InputError(f"{path}: no such directory{unfinished}")
    found = list(_recognise(path))
    if not found and path.is_dir():
        found = [each for inner in sorted(path.iterdir()) if inner.is_dir() for each in _recognise(inner)]
    if not found:
        looked = ", ".join(kind.sign for kind in (*DIRECTORIES, *FILES))
        raise InputError(f"{path}: nothing to report on, here or one directory below; looked for {looked}")
    if len(found) == 1:
        [(kind, place)] = found
        page = Page(f"{kind.name}: {place.resolve().name}")
        return page, [{"path": str(place), **kind.fill(page, place, check)}]
    page = Page(f"What is in {path.resolve().name}")
    results, rows, errors = [], [], []
    for kind, place in found:
        name = str(place.relative_to(path)) if place != path else path.resolve().name
        with page.part(f"{kind.name}: {name}") as anchor:
            try:
                result = kind.fill(page, place, check)
            except InputError as error:  # an unreadable one does not hide the others
                page.text(f"Could not be read: {error}")
                result = {"kind": kind.name.lower(), "error": str(error)}
                errors.append(error)
        results.append({"path": str(place), **result})
        rows.append([Link(name, anchor), result["kind"], _to_mebibytes(result.get("bytes")), _brief(result)])
    if len(errors) == len(found):
        raise errors[0]
    page.overview(["name", "kind", "MiB", "in short"], rows, f"{len(rows)} results, each with a section below")
    return page, results


def _to_mebibytes(size: int | dict[str, int] | None) -> float | None:
    """Return the size of weights, or of all experts of a library."""
    total = sum(size.values()) if isinstance(size, dict) else size
    return None if total is None else total / 2**20


def _brief(found: dict[str, Any]) -> str:
    """Return one line that summarises a page."""
    if "error" in found:
        return f"could not be read: {found['error']}"
    match found["kind"]:
        case "library":
            ratio = "" if found["ratio"] is None else f", with their base {found['ratio']:.2f}× its space"
            damaged = "; NOT SOUND" if found["sound"] is False else ""
            return f"{len(found['experts'])} experts{ratio}{damaged}"
        case "alignment":
            return f"{len(found['models'])} networks, {found['permutations']} permutations"
        case "demo":
            return f"{len(found['merging'])} models on {len(found['tasks'])} tasks"
        case "autopilot":
            return f"{found['verdict']}: {found['kept']}"
        case "study":
            return f"{found['trials']} trials{'' if found['ended'] else ', not ended'}"
        case "evaluation":
            return f"{found['model']} is {found['verdict']}"
        case "sweep":
            return f"{found['variants']} variants, best {found['best']}"
    made = f"merged by {found['methods']}; " if found["methods"] else ""
    failed = [name for name, holds in found["checks"].items() if not holds]
    missed = f"; FAILED: {', '.join(failed)}" if failed else ""
    return f"{made}{found['tensors']} tensors, {found['parameters']:,} parameters{missed}"


def _recognise(path: Path) -> Iterator[tuple[Kind, Path]]:
    """Yield what a path is: at most one kind of directory, and the files of other kinds in it."""
    if path.is_file():
        kinds = [kind for kind in FILES if kind.recognise(path)]
        yield from ((kind, path) for kind in kinds or ([STUDY] if studies.is_database(path) else []))
        return
    yield from ((kind, path) for kind in [kind for kind in DIRECTORIES if kind.recognise(path)][:1])
    for file in sorted(path.iterdir()):
        if file.is_file():
            yield from ((kind, file) for kind in FILES if kind.recognise(file))
