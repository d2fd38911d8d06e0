"""`merganser merge`: write a checkpoint from a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from merganser.cli.limits import memory_limit
from merganser.cli.options import (
    Device,
    DryRun,
    Dtype,
    Json,
    Memory,
    Overwrite,
    Quantize,
    Ray,
    Recipe,
    RecipeSeed,
    Resume,
    ShardSize,
    Workers,
)
from merganser.cli.plan import command as show_plan
from merganser.cli.plan import show_merge
from merganser.cli.proof import show_proofs
from merganser.cli.quantisation import show_errors
from merganser.cli.writing import writing

if TYPE_CHECKING:
    from merganser.engine.merge import Merge


def command(
    recipe: Recipe,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Directory to create, or one file: OUT.safetensors.")],
    dry_run: DryRun = False,
    resume: Resume = False,
    overwrite: Overwrite = False,
    seed: RecipeSeed = None,
    dtype: Dtype = None,
    shard_size: ShardSize = None,
    quantize: Quantize = None,
    memory: Memory = None,
    workers: Workers = None,
    ray: Ray = None,
    device: Device = "cpu",
    allow_nan: Annotated[bool, typer.Option("--allow-nan", help="Continue if an input contains NaN.")] = False,
    prove: Annotated[
        bool, typer.Option("--prove", help="First compare every adapted layer with PEFT's own merge.")
    ] = False,
    changes: Annotated[
        bool, typer.Option("--changes/--no-changes", help="Record what the merge changes, for `merganser report`.")
    ] = True,
    digest: Annotated[
        str | None,
        typer.Option("--digest", metavar="KIND", help="Digest in the lock file: sha256 (proof) or xxh3_128 (fast)."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Merge checkpoints according to a recipe.

    Reports every problem with the recipe and the checkpoints before reading any weights. Continue an interrupted merge
    with --resume: the bytes are the same, and OUT appears only when it is complete. --dry-run is the same as `merganser
    plan RECIPE`.
    """
    options: dict[str, Any] = {"seed": seed, "dtype": dtype, "shard_size": shard_size, "quantize": quantize}
    if dry_run:
        show_plan(recipe, memory=memory, workers=workers, device=device, as_json=as_json, **options)
        return
    from merganser.engine.allocator import keep_freed_memory
    from merganser.recipes.running import run

    keep_freed_memory()
    limit = memory_limit(memory)
    begun: list[Merge] = []

    def on_merge(merge: Merge) -> None:
        begun.append(merge)
        show_merge(merge, memory, workers, as_json)
        if prove:
            show_proofs(merge, as_json)

    with writing(out, "merging", as_json, "made by this recipe from these models") as reporting:
        run(
            recipe,
            out,
            **options,
            resume=resume,
            overwrite=overwrite,
            workers=workers,
            memory=limit,
            device=device,
            allow_nan=allow_nan,
            ray=ray,
            processes=True,
            changes=changes,
            digest=digest,
            on_merge=on_merge,
            **reporting,
        )
        show_errors(begun[0], as_json)
