"""`merganser transplant-tokenizer`: give a model the tokenizer of another."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from merganser.cli.options import Out
from merganser.cli.writing import writes_view


@writes_view
def command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Checkpoint to change.")],
    out: Out,
    donor: Annotated[str, typer.Option("--from", metavar="CKPT", help="Checkpoint whose tokenizer to use.")],
    absent: Annotated[
        str,
        typer.Option(help="Rule for tokens MODEL lacks: omp, nearest, subwords, weighted_subwords, mean or zero."),
    ] = "omp",
    terms: Annotated[int | None, typer.Option(min=1, help="Shared rows that omp combines; default 8.")] = None,
    pad_to_multiple_of: Annotated[
        int | None, typer.Option(min=1, help="Add rows of padding until their number is a multiple of this.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="Dtype of the output; default: that of MODEL.")] = None,
) -> Any:
    """Give a model the tokenizer of another. Keeps the rows of shared tokens and computes the others by a rule."""
    from merganser.surgery.transplants import transplant

    return transplant(model, donor, absent=absent, terms=terms, pad_to_multiple_of=pad_to_multiple_of)
