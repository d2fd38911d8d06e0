"""`save`: the one way of a checkpoint, or of whatever is computed as one, to disk."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from merganser.checkpoints.cards import Lineage
from merganser.checkpoints.dtypes import dtype_name
from merganser.checkpoints.opening import Reference
from merganser.checkpoints.opening import open as open_checkpoint
from merganser.engine.disk import Disk
from merganser.engine.execute import DEFAULT_MEMORY, Progress, execute
from merganser.engine.export import write_merge
from merganser.engine.merge import Merge
from merganser.engine.plan import Model
from merganser.engine.writer import CheckpointWriter
from merganser.lazy import torch
from merganser.recipes.loading import load
from merganser.recipes.planning import prepare
from merganser.recipes.running import check_workers


def save(
    checkpoint: Reference,
    out: str | os.PathLike[str],
    *,
    dtype: str | torch.dtype | None = None,
    resume: bool = False,
    overwrite: bool = False,
    workers: int | None = None,
    memory: int = DEFAULT_MEMORY,
    on_progress: Callable[[Progress], None] | None = None,
    disk: Disk | None = None,
) -> Path:
    """Write whatever `merganser.open` opens as a checkpoint directory, tensor by tensor.

    An adapter becomes part of its base (`base+adapter`), a task vector or `base + 0.4 * τ` is computed as it is
    written, codes of a GGUF file become numbers, torch files safetensors; config and tokenizer are copied beside the
    weights. Codes of a quantised model stay codes.

    Args:
        checkpoint: A path, hub id, checkpoint, expression of task vectors, expert of a library, state dict or module.
        out: The directory to write.
        dtype: What floating tensors are cast to, which `config.json` then says too; by default they stay as they are.
        resume: Continue a copy that was interrupted.
        overwrite: Replace `out`, or an unfinished copy.
        workers: The number of threads; by default one for each core.
        memory: How many bytes the work may hold at once.
        on_progress: Called whenever a tensor is finished.
        disk: What touches the disk; tests make it fail.

    Returns:
        The directory.

    Raises:
        MerganserError: If the checkpoint or the place are wrong, before any work; or if values do not fit `dtype`.

    Example:
        >>> mg.save(mg.open("base") + 0.4 * mg.TaskVector("math", "base"), "out/")
    """
    check_workers(workers, "cpu")
    source = open_checkpoint(checkpoint)
    output = {} if dtype is None else {"dtype": dtype_name(dtype)}
    lineage = source.lineage()
    is_view = lineage != Lineage()
    # No recipe makes a view again: its label is no reference, whatever it looks like.
    document = {"method": "passthrough", "models": ["view" if is_view else source.label], "output": output}
    prepared = prepare(load(document), lambda _: source)
    if is_view:
        told = replace(prepared.plan.sidecars, lineage=lineage, recipe="")
        prepared = Merge(replace(prepared.plan, models=(Model(source.label),), sidecars=told), prepared.sources)

    def compute(writer: CheckpointWriter) -> None:
        execute(prepared, writer, workers=workers, memory=memory, on_progress=on_progress)

    return write_merge(prepared, out, compute, resume=resume, overwrite=overwrite, disk=disk)
