"""`merganser extract-lora` and `merganser merge-lora`: adapters for PEFT and vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from merganser.cli.options import Base, FactorDtype, Json, LowRankOnly, Out, Overwrite, Seed
from merganser.cli.output import emit, say
from merganser.cli.progress import ProgressReporter
from merganser.excerpts import list_some

if TYPE_CHECKING:
    from merganser.library.adapter_merging import MergeSpace
    from merganser.library.adapter_writing import AdapterReport


def command(
    finetuned: Annotated[str, typer.Argument(metavar="FINETUNED", help="The fine-tuned checkpoint.")],
    out: Out,
    base: Base,
    rank: Annotated[int | None, typer.Option(min=1, help="Rank of the adapter; default: 64.")] = None,
    energy: Annotated[
        float | None, typer.Option(help="Instead of a rank: share of each matrix's energy to keep, such as 0.95.")
    ] = None,
    budget: Annotated[
        str | None, typer.Option(metavar="LIMIT", help="Instead of a rank: bytes of all factors, such as 50MB.")
    ] = None,
    include: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Parameters to adapt, such as '*.mlp.*'; may be repeated."),
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN", help="Parameters to exclude; may be repeated.")
    ] = None,
    low_rank_only: LowRankOnly = False,
    dtype: FactorDtype = "bfloat16",
    fan_in_fan_out: Annotated[
        bool | None,
        typer.Option(
            "--fan-in-fan-out/--no-fan-in-fan-out",
            help="Weights are stored as input × output, as in GPT-2; default: decided by the model's class.",
        ),
    ] = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Extract a LoRA adapter from a fine-tuned model.

    The adapter is the best approximation of its rank to what fine-tuning changed, in PEFT's format.
    """
    from merganser.library.lora import extract_lora

    with ProgressReporter("extracting", "tensors") as reporter:
        report = extract_lora(
            finetuned,
            base,
            out,
            rank=rank,
            energy=energy,
            budget=budget,
            include=include or ("*",),
            exclude=exclude or (),
            whole=not low_rank_only,
            dtype=dtype,
            fan_in_fan_out=fan_in_fan_out,
            overwrite=overwrite,
            on_progress=reporter,
        )
    show_report(report, as_json)


def merge_command(
    adapters: Annotated[list[str], typer.Argument(metavar="ADAPTER", help="LoRA adapters of one base.")],
    out: Out,
    space: Annotated[
        str, typer.Option(help="Space to merge in: core_space, knots, full, or concat (exact, concatenated factors).")
    ] = "core_space",
    method: Annotated[str, typer.Option(help="Merging method, e.g. tsv, ties, dare_linear, task_arithmetic.")] = "tsv",
    weight: Annotated[
        list[float] | None, typer.Option("--weight", "-w", help="Weight of an adapter; give one per adapter, in order.")
    ] = None,
    density: Annotated[
        list[float] | None, typer.Option(help="Share of entries to keep; one for all, or one per adapter.")
    ] = None,
    scale: Annotated[float, typer.Option(help="Factor on the merged update.")] = 1.0,
    rank: Annotated[
        int | None, typer.Option(min=1, help="Rank of the adapter; default: the rank that the adapters span.")
    ] = None,
    base: Annotated[
        str | None,
        typer.Option("--base", metavar="CKPT", help="Base; required if only some adapters save a module in full."),
    ] = None,
    dtype: FactorDtype = "bfloat16",
    seed: Seed = 0,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Merge LoRA adapters into one adapter."""
    from merganser.library.adapter_merging import merge_adapters

    settings: dict[str, Any] = {}
    if density:
        settings["density"] = density[0] if len(density) == 1 else density
    with ProgressReporter("merging", "weights") as reporter:
        report = merge_adapters(
            adapters,
            out,
            space=cast("MergeSpace", space),
            method=method,
            weights=weight or None,
            scale=scale,
            rank=rank,
            base=base,
            dtype=dtype,
            seed=seed,
            overwrite=overwrite,
            on_progress=reporter,
            **settings,
        )
    show_report(report, as_json)


def show_report(report: AdapterReport, as_json: bool) -> None:
    from merganser.library.served_adapters import vllm_objections, vllm_options

    objections = vllm_objections(report.path)
    if as_json:
        emit({"event": "done", **report.to_dict(), "vllm_objections": objections})
        return
    say(f"wrote {report.path}: rank {report.rank}, {report.modules} modules, {report.energy:.1%} of the energy")
    say(f"residual over all tensors: {report.residual:.2e}")
    for note in report.notes:
        say(note)
    if report.whole:
        say(f"{len(report.whole)} tensors are saved whole, such as {report.whole[0]!r}")
    if report.left_out:
        say(f"left out, although they changed: {list_some(report.left_out, 5)}")
    if objections:
        say("PEFT loads it; vLLM does not:")
        for objection in objections:
            say(f"  {objection}")
    else:
        say(f"PEFT loads it, and so does vLLM with {vllm_options(report.path)}")
