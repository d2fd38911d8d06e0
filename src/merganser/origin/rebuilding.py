"""`rebuild`: compute an output again from its sources and compare it bit by bit."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path

from merganser.checkpoints.opening import open as open_checkpoint
from merganser.checkpoints.references import parts
from merganser.checkpoints.safetensors_file import SafetensorsFile
from merganser.checkpoints.stored_entries import StoredEntries
from merganser.checkpoints.weight_files import WeightFile, name_in_file, open_weights, read_header
from merganser.engine.blocks import Piece
from merganser.engine.changes import Change
from merganser.engine.compute import Arithmetic
from merganser.engine.execute import Progress, execute
from merganser.engine.layout import lay_out
from merganser.engine.merge import Merge
from merganser.engine.origin import SINGLE, Ancestry, lock_path
from merganser.engine.plan import Output, Plan
from merganser.engine.sinks import Digests
from merganser.engine.workers import DEFAULT_MEMORY
from merganser.errors import InputError
from merganser.lazy import np
from merganser.origin.lock_file import LockFile, read_lock
from merganser.origin.verification import Verification, find_output
from merganser.recipes.loading import load
from merganser.recipes.planning import prepare


def rebuild(
    directory: str | os.PathLike[str],
    *,
    root: str | os.PathLike[str] | None = None,
    sources: Mapping[str, str] | None = None,
    sample: int | None = None,
    workers: int | None = None,
    memory: int = DEFAULT_MEMORY,
    on_progress: Callable[[Progress], None] | None = None,
) -> Verification:
    """Compute an output again with the recipe in its lock file and compare every bit, without writing anything.

    Args:
        directory: The output.
        root: Where the relative paths of the recipe start; by default the working directory.
        sources: Models that are elsewhere now: their paths in the recipe -> where they are.
        sample: How many tensors to compute, drawn at random; by default all.
        workers: Threads; by default one for each core.
        memory: How many bytes the work may hold at once.
        on_progress: Called whenever a tensor is finished.

    Returns:
        How much was compared, every tensor that differs, and every source that is not what was merged.

    Raises:
        InputError: If there is no lock file or no recipe in it, or a source cannot be opened.

    Example:
        >>> mg.origin.rebuild(mg.run("recipe.yml", "out/"), sample=2).problems
        ()
    """
    place, lock = Path(directory), read_lock(directory)
    if lock.recipe is None:
        raise InputError(f"{lock_path(place)}: has no recipe, so the output cannot be computed again")
    moved = dict(sources or {})
    merge = _prepare(lock, Path(root) if root is not None else None, moved)
    files = {name: open_weights(find_output(place, name)) for name in lock.outputs}
    homes = {name: files[file] for file, names in lock.outputs.items() for name in names}
    inside = {name: name_in_file(file, name) for file, names in lock.outputs.items() for name in names}
    made = {output.name: output for output in merge.plan.outputs}
    problems = [f"{name!r} is in the lock file, and the recipe does not make it" for name in homes if name not in made]
    problems += [f"{name!r} is made by the recipe, and not in the lock file" for name in made if name not in homes]
    outputs = []
    for name in homes.keys() & made.keys():
        file, spec = homes[name], made[name].spec
        if isinstance(file, SafetensorsFile) and (stored := file.spec(inside[name])) != spec:
            problems.append(f"{name!r} is {stored}, and the recipe makes {spec}")
        elif (size := len(file.read_bytes(inside[name]))) != spec.nbytes:
            problems.append(f"{name!r} takes {size} bytes, and the recipe makes {spec.nbytes}")
        else:
            outputs.append(made[name])
    if not problems:
        problems += _compare_headers(merge.plan, place, files, lock.fingerprint)
    if sample is not None and sample < len(outputs):
        # Unpredictable, so that a forger cannot prepare for it.
        outputs = random.SystemRandom().sample(outputs, max(1, sample))
    chosen = {output.name: homes[output.name].read_bytes(inside[output.name]) for output in outputs}
    sink = ComparingSink(chosen, {output.name for output in merge.plan.outputs} - chosen.keys())
    settings = Arithmetic(allow_nan=True, digest=lock.digest)
    execute(merge, sink, workers=workers, memory=memory, settings=settings, on_progress=on_progress)
    problems += [f"{name!r} differs in {count:,} bytes" for name, count in sorted(sink.different.items())]
    problems += _compare_sources(merge, lock, sink.read)
    return Verification(len(outputs), sum(output.spec.nbytes for output in outputs), tuple(problems))


class ComparingSink:
    """Compares computed tensors with the stored ones.

    Args:
        expected: The bytes of the outputs to compare.
        skipped: The outputs that need not be computed.
    """

    def __init__(self, expected: Mapping[str, memoryview], skipped: Collection[str]) -> None:
        self._expected = expected
        self._skipped = skipped
        self._lock = threading.Lock()
        #: Outputs that differ -> the number of different bytes.
        self.different: dict[str, int] = {}
        self.read: dict[str, dict[str, str]] = {}

    def done(self) -> Collection[str]:
        return self._skipped

    def write(self, output: Output, piece: Piece, entries: StoredEntries) -> None:
        if not piece.numel:
            return
        size = output.spec.element.itemsize
        there = self._expected[output.name][piece.offset * size : (piece.offset + piece.numel) * size]
        made = entries.bytes
        if made.data == there:
            return
        different = int(np.count_nonzero(made != np.frombuffer(there, np.uint8)))
        with self._lock:
            self.different[output.name] = self.different.get(output.name, 0) + different

    def finished(self, output: Output, change: Change | None, sources: Digests) -> None:
        with self._lock:
            for file, tensors in sources.items():
                self.read.setdefault(file, {}).update(tensors)


def _prepare(lock: LockFile, root: Path | None, moved: Mapping[str, str]) -> Merge:
    """Prepare the recipe of a lock file, with the original names of models, which seed random numbers."""
    recipe, back = _relocate(lock.recipe, moved)
    merge = prepare(load(recipe, root), open_checkpoint)
    models = tuple(replace(model, label=back.get(model.label, model.label)) for model in merge.plan.models)
    return Merge(replace(merge.plan, models=models), merge.sources)


def _compare_headers(plan: Plan, place: Path, files: Mapping[str, WeightFile], fingerprint: str) -> list[str]:
    if place.suffix in SINGLE:
        plan = replace(plan, sidecars=replace(plan.sidecars, single=True, fingerprint=fingerprint))
        headers = dict.fromkeys(files, lay_out(plan)[0].header)
    else:
        headers = {shard.file: shard.header for shard in lay_out(plan)}
    return [
        f"{name}: its header differs from the recipe's"
        for name, file in files.items()
        if read_header(file) != headers.get(name)
    ]


def _relocate(recipe: object, moved: Mapping[str, str]) -> tuple[dict[str, object], dict[str, str]]:
    """Return the recipe with the new paths of models, and their old names; a model may be part of `model+adapter`."""
    names: dict[str, str] = {}
    found: set[str] = set()

    def walk(inner: object) -> object:
        if isinstance(inner, Mapping):
            return {key: walk(each) for key, each in inner.items()}
        if isinstance(inner, list):
            return [walk(each) for each in inner]
        if not isinstance(inner, str) or not (used := moved.keys() & (pieces := parts(inner, moved.__contains__))):
            return inner
        found.update(used)
        now = "+".join(moved.get(piece, piece) for piece in pieces)
        names[now] = inner
        return now

    relocated = walk(recipe)
    assert isinstance(relocated, dict)
    if unknown := sorted(moved.keys() - found):
        raise InputError(f"moved: the recipe in the lock file has no model {unknown[0]!r}; use the name in the recipe")
    return relocated, names


def _compare_sources(merge: Merge, lock: LockFile, read: Digests) -> list[str]:
    ancestry = Ancestry(read)
    for model, source in zip(merge.plan.models, merge.sources, strict=True):
        ancestry.describe(model, source)
    return [
        f"source {file}: {name!r} has changed since the merge"
        for file, found in ancestry.files.items()
        for name, digest in found["tensors"].items()
        if lock.sources.get(file, {}).get(name) != digest
    ]
