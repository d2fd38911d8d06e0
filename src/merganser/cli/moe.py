"""`merganser moe`: combine dense models into a mixture of experts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from merganser.cli.options import DryRun, Json, Memory, Out, Overwrite, Resume, Workers
from merganser.cli.views import write_view


def command(
    recipe: Annotated[
        Path, typer.Argument(metavar="RECIPE", help="Recipe file (YAML), in the format of mergekit-moe.")
    ],
    out: Out,
    dry_run: DryRun = False,
    resume: Resume = False,
    overwrite: Overwrite = False,
    memory: Memory = None,
    workers: Workers = None,
    as_json: Json = False,
) -> None:
    """Combine dense models into a mixture of experts: Mixtral, Qwen2-MoE, Qwen3-MoE or DeepSeek."""
    from merganser.surgery.mixtures import moe

    write_view(moe(recipe), out, None, dry_run, resume, overwrite, memory, workers, as_json)
