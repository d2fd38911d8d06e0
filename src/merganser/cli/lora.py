"""`merganser extract-lora` and `merganser merge-lora`: adapters for PEFT and vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, cast

import typer

from merganser.cli.options import Base, Json, Out, Overwrite
from merganser.cli.output import emit, say

if TYPE_CHECKING:
    from merganser.library.lora import AdapterReport
    from merganser.methods.adapters import Space


def command(
    finetuned: Annotated[str, typer.Argument(metavar="FINETUNED", help="The fine-tuned checkpoint.")],
    out: Out,
    base: Base,
    rank: Annotated[int, typer.Option(min=1, help="Rank of the adapter.")] = 64,
    dtype: Annotated[str, typer.Option(help="Dtype of the factors: float32, bfloat16 or float16.")] = "bfloat16",
    fan_in_fan_out: Annotated[
        bool | None,
        typer.Option(
            "--fan-in-fan-out/--no-fan-in-fan-out",
            help="Whether weights are stored input × output, as in GPT-2; by default as the config says.",
        ),
    ] = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Extract the best LoRA adapter for the difference of two checkpoints, in PEFT's format."""
    from merganser.library.lora import extract_lora

    report = extract_lora(
        finetuned,
        base,
        out,
        rank=rank,
        dtype=dtype,
        fan_in_fan_out=fan_in_fan_out,
        overwrite=overwrite,
    )
    show_report(report, as_json)


def merge_command(
    adapters: Annotated[list[str], typer.Argument(metavar="ADAPTER", help="PEFT adapters of one base.")],
    out: Out,
    space: Annotated[str, typer.Option(help="Shared basis: core_space or knots.")] = "core_space",
    method: Annotated[str, typer.Option(help="Merging method applied in that basis, e.g. tsv, ties, iso_c.")] = "tsv",
    rank: Annotated[
        int | None, typer.Option(min=1, help="Rank of the adapter; default: all that the adapters span.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Dtype of the factors: float32, bfloat16 or float16.")] = "bfloat16",
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Merge LoRA adapters into one adapter; no base is read."""
    from merganser.library.lora import merge_adapters

    report = merge_adapters(
        adapters,
        out,
        space=cast("Space", space),
        method=method,
        rank=rank,
        dtype=dtype,
        overwrite=overwrite,
    )
    show_report(report, as_json)


def show_report(report: AdapterReport, as_json: bool) -> None:
    if as_json:
        emit({"event": "done", **report.to_dict()})
        return
    say(f"wrote {report.path}: rank {report.rank}, {report.modules} modules, {report.energy:.1%} of the energy")
    if report.left_out:
        shown = ", ".join(report.left_out[:5]) + (" …" if len(report.left_out) > 5 else "")
        say(f"not in it, since an adapter has no place for norms, biases and tied embeddings: {shown}")
