"""`merganser extract-lora` and `merganser merge-lora`: adapters for PEFT and vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from merganser.cli.output import emit, say

if TYPE_CHECKING:
    from merganser.library.lora import AdapterReport
    from merganser.methods.adapters import Space


def command(
    finetuned: Annotated[str, typer.Argument(metavar="FINETUNED", help="The fine-tuned checkpoint.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Directory of the adapter to be made.")],
    base: Annotated[str, typer.Option("--base", help="The checkpoint it was fine-tuned from.")],
    rank: Annotated[int, typer.Option(min=1, help="Rank of the adapter.")] = 64,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "bfloat16",
    fan_in_fan_out: Annotated[
        bool | None,
        typer.Option(
            "--fan-in-fan-out/--no-fan-in-fan-out",
            help="Whether weights are stored input × output, as in GPT-2; by default as the config says.",
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on standard output.")] = False,
) -> None:
    """The best LoRA adapter for the difference of two checkpoints, in PEFT's format."""
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
    out: Annotated[Path, typer.Option("--out", help="Directory of the adapter to be made.")],
    space: Annotated[str, typer.Option(help="Shared basis: core_space or knots.")] = "core_space",
    method: Annotated[str, typer.Option(help="Rule applied in it, e.g. tsv, ties, iso_c.")] = "tsv",
    rank: Annotated[int | None, typer.Option(min=1, help="Cut the result to this rank.")] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "bfloat16",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on standard output.")] = False,
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
