"""`merganser match-experts`: reorder the experts of a mixture to match another mixture."""

from __future__ import annotations

from typing import Annotated

import typer

from merganser.cli.options import DryRun, Json, Memory, Out, Overwrite, Resume, Workers
from merganser.cli.output import emit, say
from merganser.cli.views import write_view


def command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Mixture of experts to reorder.")],
    out: Out,
    reference: Annotated[str, typer.Option("--to", metavar="CKPT", help="Mixture whose order to match.")],
    dtype: Annotated[str | None, typer.Option(help="Dtype of the output; default: that of MODEL.")] = None,
    dry_run: DryRun = False,
    resume: Resume = False,
    overwrite: Overwrite = False,
    memory: Memory = None,
    workers: Workers = None,
    as_json: Json = False,
) -> None:
    """Reorder the experts of a mixture to match another mixture, so that the two can be merged.

    The function of MODEL does not change: experts and their rows of the router move together, layer by layer. Experts
    may be stored one by one or fused. Merge the result with CKPT by any recipe.
    """
    from merganser.surgery.expert_matching import match_experts

    view = match_experts(model, reference)
    moved = [int((order != range(len(order))).sum()) for order in view.orders.values()]
    if as_json:
        emit({"event": "experts", "orders": {name: order.tolist() for name, order in view.orders.items()}})
    else:
        total = sum(map(len, view.orders.values()))
        say(f"experts    {sum(moved)} of {total} move, in {sum(map(bool, moved))} of {len(moved)} layers")
    write_view(view, out, dtype, dry_run, resume, overwrite, memory, workers, as_json)
