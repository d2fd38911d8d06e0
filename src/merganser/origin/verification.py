"""`verify`: check that an output is byte for byte as its lock file describes it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from merganser.checkpoints.digests import digest_bytes, digest_file
from merganser.checkpoints.kinds import TORCH_SUFFIXES
from merganser.checkpoints.weight_files import WeightFile, name_in_file, open_weights, read_header
from merganser.confine import confine
from merganser.engine.origin import CARD, LOCK_FILE, SINGLE, lock_path
from merganser.errors import CheckpointError
from merganser.origin.lock_file import LockFile, read_lock


@dataclass(frozen=True)
class Verification:
    """The result of comparing an output with its lock file.

    Attributes:
        tensors: How many tensors were compared.
        bytes: How many bytes those have.
        problems: What is not as it should be, one sentence each; none if all is well.
        notes: What else to know.

    Example:
        >>> mg.origin.verify(mg.run("recipe.yml", "out/")).problems
        ()
    """

    tensors: int
    bytes: int
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def verify(
    directory: str | os.PathLike[str],
    *,
    workers: int | None = None,
    on_progress: Callable[[int, int, str], None] = lambda done, total, name: None,
) -> Verification:
    """Compare an output with its lock file: every tensor, every header, and every file beside the weights.

    Args:
        directory: The output: a directory, or a single file of weights.
        workers: Threads; by default one for each core.
        on_progress: Called with the bytes compared, the bytes in all, and the name of a tensor.

    Returns:
        What was compared, and every difference.

    Raises:
        CheckpointError: If there is no lock file, or it is damaged.

    Example:
        >>> mg.origin.verify(mg.run("recipe.yml", "out/")).tensors
        6
    """
    place, lock = Path(directory), read_lock(directory)
    problems = [*_find_other_files(place, lock)]
    opened: dict[str, WeightFile] = {}
    for name, tensors in lock.outputs.items():
        path = find_output(place, name)
        try:
            opened[name] = open_weights(path)
        except FileNotFoundError:
            problems.append(f"{name} is missing")
        except (CheckpointError, OSError) as error:
            problems.append(str(error))
        else:
            wrong = _names(name, set(opened[name].names()), tensors)
            if not wrong and digest_bytes(read_header(opened[name]), "sha256") != lock.headers[name]:
                wrong = [f"{name}: its header has changed, which says what dtypes and shapes the weights have"]
            problems += wrong
    jobs = [
        (file, tensor, expected)
        for file, reader in opened.items()
        for tensor, expected in _list_stored(reader, file, lock.outputs[file])
    ]
    total = sum(len(opened[file].read_bytes(tensor)) for file, tensor, _ in jobs)
    done = 0
    with ThreadPoolExecutor(workers or os.cpu_count() or 1) as pool:
        digests = pool.map(lambda job: opened[job[0]].digest(job[1], lock.digest), jobs)
        for (file, tensor, expected), found in zip(jobs, digests, strict=True):
            done += len(opened[file].read_bytes(tensor))
            on_progress(done, total, tensor)
            if found != expected:
                changed = f"{_shorten_digest(found)}, not {_shorten_digest(expected)}"
                problems.append(f"{file}: {tensor!r} has changed: {lock.digest} {changed}")
    unknown = sorted(_unknown(place, lock))
    problems += [f"{name} holds weights, and the lock file does not know it" for name in unknown if _is_weights(name)]
    notes = tuple(f"{name} is not in the lock file" for name in unknown if not _is_weights(name))
    return Verification(len(jobs), total, tuple(problems), notes)


def find_output(place: Path, name: str) -> Path:
    """Return the path of a file of weights that a lock file names; a single file may have been renamed.

    Raises:
        CheckpointError: If the name leads out of the output.
    """
    return place if place.suffix in SINGLE else confine(place, name, f"{lock_path(place)}: outputs")


def _find_other_files(place: Path, lock: LockFile) -> Iterator[str]:
    for name, expected in lock.files.items():
        path = confine(place, name, f"{place / LOCK_FILE}: files")
        try:
            found = digest_file(path)
        except OSError:
            yield f"{name} is missing"
            continue
        if found != expected:
            yield f"{name} has changed: sha256 {_shorten_digest(found)}, not {_shorten_digest(expected)}"


def _list_stored(reader: WeightFile, file: str, tensors: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the tensors that a file contains, by their names there; the lock file prefixes those of a folder."""
    there = set(reader.names())
    for name, expected in tensors.items():
        own = name_in_file(file, name)
        if own in there:
            yield own, expected


def _names(file: str, found: set[str], expected: Mapping[str, str]) -> list[str]:
    wanted = {name_in_file(file, name) for name in expected}
    return [
        *(f"{file}: {name!r} is missing" for name in sorted(wanted - found)),
        *(f"{file}: {name!r} is not in the lock file" for name in sorted(found - wanted)),
    ]


def _unknown(place: Path, lock: LockFile) -> Iterator[str]:
    known = {*lock.outputs, *lock.files, CARD, LOCK_FILE}
    for path in place.rglob("*"):
        name = path.relative_to(place).as_posix()
        if path.is_file() and name not in known and not any(part.startswith(".") for part in name.split("/")):
            yield name


def _is_weights(name: str) -> bool:
    return name.endswith((*SINGLE, *TORCH_SUFFIXES))


def _shorten_digest(digest: str) -> str:
    return f"{digest[:12]}…"
