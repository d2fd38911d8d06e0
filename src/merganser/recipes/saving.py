"""`save`: write a checkpoint, or anything computed as one, to disk."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from merganser.checkpoints.base import Checkpoint, TensorSpec
from merganser.checkpoints.cards import Lineage
from merganser.checkpoints.dtypes import dtype_name
from merganser.checkpoints.json_file import read_config
from merganser.checkpoints.opening import Reference
from merganser.checkpoints.opening import open as open_checkpoint
from merganser.checkpoints.sidecars import apply_edits, freeze_edits
from merganser.engine.compute import Arithmetic
from merganser.engine.disk import Disk
from merganser.engine.execute import Progress
from merganser.engine.export import Execution, write_merge
from merganser.engine.merge import Merge
from merganser.engine.nested import Merged
from merganser.engine.origin import choose_digest
from merganser.engine.plan import Model
from merganser.engine.workers import DEFAULT_MEMORY, check_workers
from merganser.engine.writer import Destination
from merganser.lazy import torch
from merganser.recipes.loading import load
from merganser.recipes.planning import prepare
from merganser.recipes.sidecar_plan import dtype_edits


def save(
    checkpoint: Reference,
    out: str | os.PathLike[str],
    *,
    dtype: str | torch.dtype | None = None,
    resume: bool = False,
    overwrite: bool = False,
    workers: int | None = None,
    memory: int = DEFAULT_MEMORY,
    on_merge: Callable[[Merge], None] = lambda merge: None,
    on_progress: Callable[[Progress], None] | None = None,
    on_complete: Callable[[Path], None] = lambda out: None,
    disk: Disk | None = None,
) -> Path:
    """Write anything that `merganser.open` opens as a checkpoint directory, tensor by tensor.

    Adapters are applied to their base (`base+adapter`), task vectors and `base + 0.4 * τ` are computed while writing,
    quantised weights are dequantised, and torch files become safetensors. Config and tokenizer are copied beside the
    weights.

    Args:
        checkpoint: A path, hub id, checkpoint, expression of task vectors, expert of a library, state dict or module.
        out: The directory to write; or `OUT.safetensors`, one file with the weights alone.
        dtype: The dtype of floating tensors, also set in `config.json`; by default unchanged.
        resume: Continue a copy that was interrupted.
        overwrite: Replace `out`, or an unfinished copy.
        workers: The number of threads; by default one per core.
        memory: The memory limit in bytes.
        on_merge: Called with the merge that copies or computes the checkpoint, before any work.
        on_progress: Called whenever a tensor is finished.
        on_complete: Called, with nothing else done, if `resume` finds that `out` is complete.
        disk: The interface to the disk; tests replace it.

    Returns:
        The directory.

    Raises:
        MerganserError: If the checkpoint or `out` are invalid, before any work; or if values do not fit `dtype`.

    Example:
        >>> mg.save(mg.open("base") + 0.4 * mg.TaskVector("math", "base"), "out/")
    """
    check_workers(workers, "cpu")
    prepared, recipe = prepare_copy(open_checkpoint(checkpoint), dtype)
    on_merge(prepared)
    destination = Destination(Path(os.path.expanduser(out)), resume, overwrite, on_complete, disk or Disk())
    execution = Execution(Arithmetic(digest=choose_digest(prepared)), workers, memory, on_progress=on_progress)
    return write_merge(prepared, destination, execution, recipe=recipe)


def prepare_copy(source: Checkpoint, dtype: str | torch.dtype | None = None) -> tuple[Merge, dict[str, Any] | None]:
    """Return the merge that copies or computes a checkpoint, and its recipe if one can express it."""
    if isinstance(source, Merged):
        return _cast(source, dtype), None
    output = {} if dtype is None else {"dtype": dtype_name(dtype)}
    lineage = source.lineage()
    is_view = lineage != Lineage()
    # No recipe makes a view again: its label is no reference, whatever it looks like.
    named = ["view" if is_view else source.label]
    document = {"method": "passthrough", "models": named, "output": output}
    prepared = prepare(load(document, held=named), lambda _: source)
    if not is_view:
        return prepared, document if source.files() else None
    told = replace(prepared.plan.sidecars, lineage=lineage, recipe="")
    return Merge(replace(prepared.plan, models=(Model(source.label),), sidecars=told), prepared.sources), None


def _cast(source: Merged, dtype: str | torch.dtype | None) -> Merge:
    """Return the merge that computes a view, with its config and tokenizer, in another dtype if one is given."""
    plan = source.plan
    if dtype is not None:
        chosen = dtype_name(dtype)
        outputs = tuple(
            replace(o, spec=TensorSpec(o.spec.shape, chosen)) if o.spec.element.is_floating_point else o
            for o in plan.outputs
        )
        config = apply_edits(read_config(source.directory), plan.sidecars.config)
        edits = freeze_edits([*plan.sidecars.config, *dtype_edits(config, chosen)])
        plan = replace(plan, outputs=outputs, sidecars=replace(plan.sidecars, config=edits))
    return Merge(plan, source.sources)
