"""A plan, or a checkpoint view, to an ordinary checkpoint directory, streamed by the engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from merganser.checkpoints.base import Checkpoint, TensorSpec
from merganser.checkpoints.dtypes import dtype_of
from merganser.checkpoints.sidecars import prepare_sidecars
from merganser.engine.execute import DEFAULT_MEMORY, Progress, execute
from merganser.engine.writer import CheckpointWriter
from merganser.recipes.plan import Model, Output, Plan, Source


def write_checkpoint(
    source: Checkpoint,
    out: str | os.PathLike[str],
    *,
    dtype: str | torch.dtype | None = None,
    sidecars: Mapping[str, Any] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    workers: int | None = None,
    memory: int = DEFAULT_MEMORY,
    on_progress: Callable[[Progress], None] | None = None,
) -> Path:
    """Write `source` to the directory `out`, tensor by tensor, with the sidecars of its directory.

    Floating tensors are cast to `dtype` if one is given.
    """
    asked = None if dtype is None else dtype_of(dtype)

    def written(name: str) -> TensorSpec:
        spec = source.spec(name)
        return spec if asked is None or not spec.dtype.is_floating_point else TensorSpec(spec.shape, asked)

    plan = Plan(
        models=(Model(source.label, source.label),),
        outputs=tuple(
            Output(name, written(name), "passthrough", (Source(0, name),), parameters={"scale": [None]})
            for name in source.names()
        ),
        aliases=source.aliases(),
        sidecars=sidecars or {},
    )

    def compute(writer: CheckpointWriter) -> None:
        execute(plan, [source], writer, workers=workers, memory=memory, on_progress=on_progress)

    return write_plan(plan, [source], out, compute, resume=resume, overwrite=overwrite)


def write_plan(
    plan: Plan,
    sources: Sequence[Checkpoint],
    out: str | os.PathLike[str],
    compute: Callable[[CheckpointWriter], None],
    *,
    resume: bool = False,
    overwrite: bool = False,
) -> Path:
    """The directory `out` of a plan: `compute` gives the writer what an earlier run has not finished."""
    write_sidecars = prepare_sidecars(plan, sources)
    fingerprint = plan.fingerprint([source.fingerprint() for source in sources])
    files = [file for source in sources for file in source.files()]
    writer = CheckpointWriter(Path(out), plan, fingerprint, files, resume=resume, overwrite=overwrite)
    try:
        if not writer.published:
            compute(writer)
        return writer.publish(write_sidecars)
    except BaseException:
        writer.abandon()
        raise
