"""`merganser moe`: combine dense models into a mixture of experts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from merganser.cli.options import Out
from merganser.cli.writing import writes_view


@writes_view
def command(
    recipe: Annotated[
        Path, typer.Argument(metavar="RECIPE", help="Recipe file (YAML), in the format of mergekit-moe.")
    ],
    out: Out,
) -> Any:
    """Combine dense models into a mixture of experts.

    The mixture is a Mixtral, Qwen2-MoE, Qwen3-MoE or DeepSeek.
    """
    from merganser.surgery.mixtures import moe

    return moe(recipe)
