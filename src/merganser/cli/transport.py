"""`merganser transport`: move a fine-tune from an old base to a new one."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import TYPE_CHECKING, Annotated, Any

import typer

from merganser.cli.factories import derive_symmetry
from merganser.cli.options import AllowUnused, NetworkOutputs, Out, Shape
from merganser.cli.output import emit, say
from merganser.cli.progress import ProgressReporter
from merganser.cli.writing import WriteOptions, writes_view

if TYPE_CHECKING:
    from torch import Tensor


MATCHINGS = ("weights", "frank_wolfe", "none")


@writes_view
def command(
    expert: Annotated[str, typer.Argument(metavar="EXPERT", help="Fine-tuned checkpoint.")],
    out: Out,
    old: Annotated[str, typer.Option("--from", metavar="CKPT", help="Base that EXPERT was fine-tuned from.")],
    new: Annotated[str, typer.Option("--to", metavar="CKPT", help="Base to move it to, of the same architecture.")],
    scale: Annotated[float | None, typer.Option(help="Factor on the task vector; default 1.")] = None,
    score: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION", help="Score of a state dict (higher is better) to choose the scale by."
        ),
    ] = None,
    scales: Annotated[
        list[float] | None,
        typer.Option("--try-scale", help="Scale to choose from by --score; may be repeated. Default: 0.1, 0.2 … 2."),
    ] = None,
    matching: Annotated[str, typer.Option(help="How to match the bases: weights, frank_wolfe or none.")] = "weights",
    start: Annotated[
        str | None,
        typer.Option(
            help="Start of --matching weights: propagate, spectra (of attention heads) or identity; default: "
            "propagate and, if there are heads, spectra, whichever matches better."
        ),
    ] = None,
    kind: Annotated[str, typer.Option(help="Symmetry between the bases: permutation or orthogonal.")] = "permutation",
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION", help="Function that returns the network; default: from the config of --to."
        ),
    ] = None,
    shape: Shape = None,
    outputs: NetworkOutputs = None,
    allow_unused: AllowUnused = False,
    dtype: Annotated[str | None, typer.Option(help="Dtype of the output; default: that of --to.")] = None,
    *,
    options: WriteOptions,
) -> Any:
    """Move a fine-tune to another release of its base.

    The result is NEW + scale · π(EXPERT − OLD).

    π reorders the units of the old base to match those of the new one (or rotates them, with --kind orthogonal). It
    is computed from the weights of the bases; no data is needed. Matching holds both bases in memory. The result is
    written tensor by tensor, unless units are rotated or a score is used.
    """
    from merganser.align import transport_checkpoint
    from merganser.checkpoints import open as open_checkpoint
    from merganser.checkpoints.vectors import Difference
    from merganser.engine.publishing import check_out
    from merganser.engine.task_vector import Applied
    from merganser.errors import InputError, one_of
    from merganser.evaluate.references import import_function
    from merganser.evaluate.search import ALPHAS

    one_of("--matching", matching, MATCHINGS)
    if start is not None:
        one_of("--start", start, ("propagate", "spectra", "identity"))
    one_of("--kind", kind, ("permutation", "orthogonal"))
    if scales and score is None:
        raise InputError("--try-scale needs --score to choose by; add --score, or give one --scale")
    if scale is not None and score is not None:
        raise InputError("--scale and --score exclude each other: --score chooses the scale among --try-scale")
    if not all(map(isfinite, [*(scales or []), *([] if scale is None else [scale])])):
        raise InputError("--scale and --try-scale must be finite")
    judge = import_function(score, "--score") if score else None
    models = tuned, source, target = [open_checkpoint(reference) for reference in (expert, old, new)]
    Applied(target, Difference(tuned, source))  # refuses other architectures by their headers
    if not options.resume:
        check_out(out, options.overwrite, [file for each in models for file in each.files()])
    tried = list(scales or ALPHAS) if judge else [1.0 if scale is None else scale]
    with ProgressReporter("transporting", "steps") as reporter:
        steps = 2 + (len(tried) if judge else 0)
        reporter.step("deriving the symmetry", steps)
        symmetry, tested = None, True
        if matching != "none":
            instead = "do not match the bases (--matching none)"
            given: dict[str, Any] = {"kind": kind, "outputs": outputs, "allow_unused": allow_unused}
            symmetry, tested = derive_symmetry(target, model, shape, instead, **given)
        reporter.step("matching", steps)

        def scored(weights: Mapping[str, Tensor]) -> float:
            assert judge is not None
            reporter.step("scoring a scale", steps)
            return float(judge(weights))

        found = transport_checkpoint(
            tuned,
            source,
            target,
            symmetry,
            matching=matching,
            start=start,
            scale=tried,
            score=scored if judge else None,
        )
    report: dict[str, Any] = {"event": "transport", "matching": matching, "self_tested": tested, "scale": found.scale}
    report["atoms"] = len(symmetry.atoms) if symmetry is not None else 0
    if found.cosine is not None:
        report |= {"cosine": dict(zip(("before", "after"), found.cosine, strict=True)), "note": found.note}
    if found.scores:
        report["scores"] = {str(each): value for each, value in found.scores.items()}
    emit(report) if options.as_json else _show(report)
    return found.checkpoint


def _show(report: dict[str, Any]) -> None:
    if "cosine" in report:
        before, after = report["cosine"]["before"], report["cosine"]["after"]
        say(f"matched    {report['atoms']} groups of units; cosine of the bases {before:.4f}, then {after:.4f}")
    say(f"scale      {report['scale']:g}" + (f", the best of {len(report['scores'])}" if "scores" in report else ""))
    if report.get("note"):
        say(f"note: {report['note']}")
    if not report["self_tested"]:
        say("note: the symmetry of this large network was derived without a self-test")
