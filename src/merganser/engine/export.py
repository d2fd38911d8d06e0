"""Compute a merge and write it as an ordinary checkpoint directory."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from merganser.checkpoints.hashing import content_hash
from merganser.checkpoints.kinds import TORCH_SUFFIXES
from merganser.checkpoints.memory import Module, StateDict
from merganser.checkpoints.sidecars import prepare_sidecars
from merganser.engine.compute import Arithmetic
from merganser.engine.directories import check_replaceable, paths_in
from merganser.engine.execute import Progress, execute
from merganser.engine.layout import Shard, lay_out
from merganser.engine.merge import Merge
from merganser.engine.origin import SINGLE, Origin
from merganser.engine.plan import Plan
from merganser.engine.processes import execute_in_processes
from merganser.engine.source_files import SourceFiles
from merganser.engine.staging import Staging
from merganser.engine.workers import DEFAULT_MEMORY
from merganser.engine.writer import CheckpointWriter, Destination
from merganser.errors import InputError, MerganserError

#: Models in memory have no files to compare: their weights themselves are hashed.
_IN_MEMORY = (StateDict, Module)


@dataclass(frozen=True)
class Execution:
    """How and where a merge is computed.

    Attributes:
        settings: The arithmetic; its digest is that of the lock file. Without one, no lock file is written.
        workers: The number of workers; by default one per core.
        memory: The memory limit in bytes.
        ray: The address of a Ray cluster to compute on.
        processes: Use forked processes as workers instead of threads.
        on_progress: Called whenever a tensor is finished.
    """

    settings: Arithmetic
    workers: int | None = None
    memory: int = DEFAULT_MEMORY
    ray: str | None = None
    processes: bool = False
    on_progress: Callable[[Progress], None] | None = None

    def compute(self, merge: Merge, writer: CheckpointWriter) -> None:
        """Compute every output that the writer does not have."""
        options: Any = {"workers": self.workers, "settings": self.settings, "on_progress": self.on_progress}
        if self.ray is not None:
            from merganser.engine.ray_executor import execute_on_ray

            execute_on_ray(merge, writer, self.ray, **options)
        else:
            (execute_in_processes if self.processes else execute)(merge, writer, memory=self.memory, **options)


def write_merge(
    merge: Merge,
    destination: Destination,
    execution: Execution,
    *,
    inputs: Iterable[Path] = (),
    recipe: Mapping[str, Any] | None = None,
) -> Path:
    """Write a merge, computing the outputs that an earlier run did not finish.

    Args:
        merge: The merge.
        destination: Where to write it.
        execution: How to compute it.
        inputs: Files that must not be lost besides those of the sources, such as the recipe.
        recipe: The resolved recipe, for the lock file.

    Returns:
        The directory or file.

    Raises:
        InputError: If it cannot be written, or a source is invalid or changes meanwhile; nothing is left behind.
        MerganserError: If the work fails; finished outputs are kept for `resume`.
    """
    plan, sources, digest = merge.plan, merge.sources, execution.settings.digest
    out = destination.out
    files = SourceFiles(file for source in sources for file in source.files())
    check_replaceable(out, (*inputs, *_paths(plan), *files.paths))
    prints = [content_hash(source) if type(source) in _IN_MEMORY else source.fingerprint() for source in sources]
    identity = plan.identity(prints)
    told = replace(plan.sidecars, fingerprint=identity)
    _check_ending(out, plan)
    if out.suffix in SINGLE:
        plan = replace(plan, sidecars=replace(told, single=True))
    write_sidecars = prepare_sidecars(told, sources)
    staging = Staging(out, destination.disk)
    if destination.resume and staging.is_idle() and _is_complete(out, plan, identity, files):
        staging.tidy()
        destination.on_complete(out)
        return out
    origin = Origin(merge, identity, digest, recipe) if digest else None
    writer = CheckpointWriter(destination, plan, _work(plan, identity, digest), files, origin)
    try:
        if not writer.published:
            _compute(merge, writer, execution, files)
        return writer.publish(write_sidecars)
    except InputError:
        writer.discard()
        raise
    except BaseException:
        writer.abandon()
        raise


def _is_complete(out: Path, plan: Plan, identity: str, sources: SourceFiles) -> bool:
    """Return whether `out` was made by this plan from these sources.

    Its card has the fingerprint, its files have the headers and sizes of the plan, and no source was written since. A
    directory gets its name only when it is complete, so nothing else needs checking.
    """
    single = plan.sidecars.single  # a single file has the fingerprint in its header, and no card
    try:
        card = "" if single else (out / "README.md").read_text(encoding="utf-8")
        latest = max((state[2] for state in sources.states), default=0)
        made = all(_is_written(out if single else out / shard.file, shard, latest) for shard in lay_out(plan))
    except (OSError, UnicodeDecodeError):
        return False
    return made and (single or f"`{identity}`" in card.splitlines()[-1])


def _is_written(path: Path, shard: Shard, latest: int) -> bool:
    state = path.stat()
    if state.st_size != shard.size or state.st_mtime_ns < latest:
        return False
    with path.open("rb") as file:
        return file.read(len(shard.header)) == shard.header


def _check_ending(place: Path, plan: Plan) -> None:
    """Refuse a name that promises another format than is written."""
    ending = place.suffix.lower()
    if ending != place.suffix and ending in SINGLE:
        raise InputError(f"{place}: write the ending in lower case: {place.with_suffix(ending).name}")
    gguf = plan.sidecars.gguf is not None
    if place.suffix in SINGLE and (place.suffix == ".gguf") != gguf:
        remedy = "rename the output" if gguf else "rename the output, or set output.quantize to a type of GGUF"
        raise InputError(f"{place}: the weights are written as {'a GGUF file' if gguf else 'safetensors'}; {remedy}")
    if ending in TORCH_SUFFIXES:
        single = place.with_suffix(".safetensors").name
        raise InputError(f"{place}: torch files are read but not written; name a directory or {single}")


def _compute(merge: Merge, writer: CheckpointWriter, execution: Execution, files: SourceFiles) -> None:
    """Run the computation; if a source changed meanwhile, report that as the cause of a failure."""
    try:
        execution.compute(merge, writer)
    except MerganserError as error:
        try:
            files.check()
        except InputError as cause:
            raise cause from error
        raise


def _work(plan: Plan, identity: str, digest: str | None) -> str:
    """Return the fingerprint of the work that can be resumed: what is merged, and the files it goes to."""
    files = [(shard.file, shard.header, shard.size) for shard in lay_out(plan)]
    return hashlib.sha256(repr((identity, digest, files)).encode()).hexdigest()


def _paths(plan: Plan) -> Iterator[Path]:
    """Yield the files and directories that a plan reads, as far as its references are paths."""
    for model in plan.models:
        if model.plan is not None:
            yield from _paths(model.plan)
        else:
            yield from paths_in(model.path)
