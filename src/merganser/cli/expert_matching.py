"""`merganser match-experts`: reorder the experts of a mixture to match another mixture."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from merganser.cli.options import Out
from merganser.cli.output import emit, say
from merganser.cli.writing import WriteOptions, writes_view


@writes_view
def command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Mixture of experts to reorder.")],
    out: Out,
    reference: Annotated[str, typer.Option("--to", metavar="CKPT", help="Mixture whose order to match.")],
    dtype: Annotated[str | None, typer.Option(help="Dtype of the output; default: that of MODEL.")] = None,
    *,
    options: WriteOptions,
) -> Any:
    """Put the experts of a mixture in another's order.

    Then the two can be merged.

    The function of MODEL does not change: experts and their rows of the router move together, layer by layer. Experts
    may be stored one by one or fused. Merge the result with CKPT by any recipe.
    """
    from merganser.surgery.expert_matching import match_experts

    view = match_experts(model, reference)
    moved = [int((order != range(len(order))).sum()) for order in view.orders.values()]
    if options.as_json:
        emit({"event": "experts", "orders": {name: order.tolist() for name, order in view.orders.items()}})
    else:
        total = sum(map(len, view.orders.values()))
        say(f"experts    {sum(moved)} of {total} move, in {sum(map(bool, moved))} of {len(moved)} layers")
    return view
