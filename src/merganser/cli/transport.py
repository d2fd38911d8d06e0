"""`merganser transport`: move a fine-tune from an old base to a new one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf, isfinite, isnan
from typing import TYPE_CHECKING, Annotated, Any

import typer

from merganser.cli.factories import derive_from_config, derive_symmetry
from merganser.cli.options import AllowUnused, NetworkOutputs, Out, Shape
from merganser.cli.output import emit, say
from merganser.cli.progress import ProgressReporter
from merganser.cli.writing import WriteOptions, writes_view

if TYPE_CHECKING:
    from torch import Tensor

    from merganser.align import Symmetry
    from merganser.checkpoints import Checkpoint

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
    from merganser.checkpoints import open as open_checkpoint
    from merganser.engine.publishing import check_out
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
    models = [open_checkpoint(reference) for reference in (expert, old, new)]
    _check(models)
    if not options.resume:
        check_out(out, options.overwrite, [file for each in models for file in each.files()])
    with ProgressReporter("transporting", "steps") as reporter:
        steps = 2 + (len(scales or ALPHAS) if judge else 0)
        reporter.step("deriving the symmetry", steps)
        symmetry, tested = _derive(
            models[2], matching, model, shape, kind=kind, outputs=outputs, allow_unused=allow_unused
        )
        reporter.step("matching", steps)

        def scored(weights: Mapping[str, Tensor]) -> float:
            assert judge is not None
            reporter.step("scoring a scale", steps)
            return float(judge(weights))

        view, report = _transport(models, symmetry, matching, start, scale, scales, scored if judge else None)
    report |= {"event": "transport", "self_tested": tested}
    emit(report) if options.as_json else _show(report)
    return view


def _check(models: list[Checkpoint]) -> None:
    """Refuse models of different architectures, judged by their headers."""
    from merganser.checkpoints.differences import Difference
    from merganser.engine.task_vector import Applied

    expert, old, new = models
    Applied(new, Difference(expert, old))


def _derive(
    new: Checkpoint, matching: str, model: str | None, shape: str | None, **options: Any
) -> tuple[Symmetry, bool]:
    """Return the symmetry of the architecture, empty if nothing is matched, and whether it was self-tested."""
    from merganser.align.symmetries import Factor, Symmetry, product

    if matching == "none":
        axes = {name: tuple(product(Factor(None, n)) for n in new.spec(name).shape) for name in new}
        return Symmetry({}, axes, aliases=dict(new.aliases())), True
    if model is not None:
        return derive_symmetry(model, shape, **options), True
    return derive_from_config(new, "do not match the bases (--matching none)", **options)


def _transport(
    models: list[Checkpoint],
    symmetry: Symmetry,
    matching: str,
    start: str | None,
    scale: float | None,
    candidates: list[float] | None,
    judge: Any,
) -> tuple[Checkpoint, dict[str, Any]]:
    from merganser.align.permutations import identity
    from merganser.align.state import states_of
    from merganser.align.transports import match_bases, transport, transported
    from merganser.checkpoints.memory import StateDict
    from merganser.evaluate.search import ALPHAS

    expert, old, new = models
    report: dict[str, Any] = {"matching": matching, "atoms": len(symmetry.atoms)}
    permutations = identity(symmetry)
    if matching != "none":
        states = states_of([new, old], symmetry)
        report["cosine"] = {"before": _cosine(states[0], states[1], symmetry)}
        options = {"start": start} if matching == "weights" and start else {}
        found = match_bases(states[0], states[1], symmetry, matching, **options)
        permutations = found.permutations
        report["cosine"]["after"] = _cosine(states[0], found.apply(states[1]), symmetry)
        report["note"] = found.note
        del states
    rotated = any(atom.group != "permutation" for atom in symmetry.atoms.values())
    if judge is None and not rotated:
        report["scale"] = 1.0 if scale is None else scale
        return transported(expert, old, new, symmetry, permutations, report["scale"]), report
    chosen: Sequence[float] = (candidates or ALPHAS) if judge else [1.0 if scale is None else scale]
    scores: list[float] = []

    def record(weights: Mapping[str, Tensor]) -> float:
        scores.append(float(judge(weights)))
        return scores[-1]

    made = transport(expert, old, new, symmetry, alignment=permutations, scale=chosen, score=record if judge else None)
    ranked = [-inf if isnan(score) else score for score in scores]
    report["scale"] = chosen[ranked.index(max(ranked))] if judge else chosen[0]
    if judge:
        report["scores"] = dict(zip(map(str, chosen), scores, strict=True))
    kept = {name: made[name] for name in new.names()}
    kept |= {alias: kept[name] for alias, name in new.aliases().items()}
    view = StateDict(kept, f"{expert.label} on {new.label}")
    view.directory = new.directory
    return view, report


def _cosine(a: dict[str, Tensor], b: dict[str, Tensor], symmetry: Symmetry) -> float:
    from merganser.align.objective import inner

    def total(x: dict[str, Tensor], y: dict[str, Tensor]) -> float:
        return float(sum(inner(x[name].float(), y[name].float()) for name in symmetry.objective))

    norm = (total(a, a) * total(b, b)) ** 0.5
    return total(a, b) / norm if norm else 0.0


def _show(report: dict[str, Any]) -> None:
    if "cosine" in report:
        before, after = report["cosine"]["before"], report["cosine"]["after"]
        say(f"matched    {report['atoms']} groups of units; cosine of the bases {before:.4f}, then {after:.4f}")
    say(f"scale      {report['scale']:g}" + (f", the best of {len(report['scores'])}" if "scores" in report else ""))
    if report.get("note"):
        say(f"note: {report['note']}")
    if not report["self_tested"]:
        say("note: the symmetry of this large network was derived without a self-test")
