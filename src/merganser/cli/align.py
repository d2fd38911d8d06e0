"""`merganser align`: bring networks that were trained independently into one space."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from merganser.cli.factories import build_network, derive_symmetry, load_batches
from merganser.cli.naming import name_checkpoints
from merganser.cli.options import AllowUnused, Json, NetworkOutputs, Out, Overwrite, Seed, Shape
from merganser.cli.output import emit, say
from merganser.cli.progress import ProgressReporter
from merganser.plain import plain

if TYPE_CHECKING:
    from torch import nn

    from merganser.align import Symmetry, Universe
    from merganser.checkpoints import Checkpoint

MATCHINGS = ("universe", "weights", "frank_wolfe", "merge_many")


def command(
    checkpoints: Annotated[
        list[str], typer.Argument(metavar="CKPT", help="Two or more checkpoints: paths, or NAME=PATH.")
    ],
    out: Out,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="Function that returns the network, or (network, example_inputs); default: from the config of the "
            "first CKPT.",
        ),
    ] = None,
    shape: Shape = None,
    matching: Annotated[
        str, typer.Option(help="Matching: universe (C²M³) or merge_many; to the first model: weights or frank_wolfe.")
    ] = "universe",
    kind: Annotated[
        str,
        typer.Option(help="Symmetry of the networks: permutation, or orthogonal to rotate units of transformers too."),
    ] = "permutation",
    permutations: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Reuse permutations.safetensors of an earlier run instead of matching."),
    ] = None,
    seed: Seed = 0,
    outputs: NetworkOutputs = None,
    batches: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="Function that returns labelled batches (inputs, targets): measure loss barriers before and after.",
        ),
    ] = None,
    allow_unused: AllowUnused = False,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Align networks trained apart and average them.

    The symmetries are derived from the network itself and self-tested; no data is needed. OUT contains
    aligned/NAME.safetensors for every checkpoint (the same function, in the common space), merged.safetensors,
    permutations.safetensors, symmetry.json and alignment.json (the printed results). Models with a config become
    directories that transformers loads: aligned/NAME and merged. `merganser report OUT` writes a page about them.
    With --batches, it shows the loss between every two networks before and after alignment, and over the plane of
    the first three; the loss is the cross-entropy for classes, else the mean squared error.
    """
    from merganser import align
    from merganser.align.saving import has_config
    from merganser.analysis.alignments import compare_losses, compare_weights
    from merganser.checkpoints import open as open_checkpoint
    from merganser.engine.directories import check_replaceable, paths_in
    from merganser.engine.publishing import check_out, publish
    from merganser.errors import InputError, one_of

    named = name_checkpoints(checkpoints)
    if len(named) < 2:
        raise InputError("align needs at least two checkpoints")
    one_of("--matching", matching, MATCHINGS)
    one_of("--kind", kind, ("permutation", "orthogonal"))
    inputs = [path for reference in named.values() for path in paths_in(reference)]
    check_out(out, overwrite, [*inputs, *([permutations] if permutations else [])])
    network, data = _load_batches(batches, model) if batches else (None, [])
    models = {name: open_checkpoint(path) for name, path in named.items()}
    opened = list(models.values())
    check_replaceable(out, [file for checkpoint in opened for file in checkpoint.files()])
    _check_shapes(opened)
    steps = 5 if network is not None else 4
    with ProgressReporter("aligning", "steps") as reporter:
        if permutations is not None:
            reporter.step("reading", steps)
            found = align.Universe.load(permutations, opened)
        else:
            reporter.step("deriving the symmetry", steps)
            options = {"kind": kind, "outputs": outputs or None, "allow_unused": allow_unused}
            instead = "reuse --permutations of an earlier run"
            symmetry, tested = derive_symmetry(opened[0], model, shape, instead, **options)
            if not tested:
                say("note: the symmetry of this large network was derived without a self-test", sys.stderr)
            reporter.step("matching", steps)
            found = _match(opened, symmetry, matching, seed)
        reporter.step("comparing", steps)
        report = {"method": "given" if permutations else matching, **compare_weights(found, list(named))}
        if network is not None:
            reporter.step("measuring barriers", steps)
            report["landscape"] = compare_losses(found, list(named), network, data)
        reporter.step("writing", steps)

        def write(directory: Path) -> None:
            align.save_aligned(found, models, directory)
            (directory / "alignment.json").write_text(json.dumps(plain(report), indent=1) + "\n", encoding="utf-8")

        publish(out, write, overwrite=overwrite)
    merged = "merged/" if has_config(opened[0]) else "merged.safetensors"
    _show({**report, "out": str(out), "merged": merged}, as_json)


def _check_shapes(opened: Sequence[Checkpoint]) -> None:
    """Refuse networks of different shapes, before any weight is read."""
    from merganser.errors import InputError

    first = opened[0]
    for other in opened[1:]:
        for name in (name for name in first.names() if name in other):
            own, expected = (tuple(each.spec(name).shape) for each in (other, first))
            if own != expected:
                raise InputError(
                    f"{other.label}: {name!r} is {own}, in {first.label} {expected}; align networks of one architecture"
                )


def _match(models: Sequence[Checkpoint], symmetry: Symmetry, matching: str, seed: int) -> Universe:
    from merganser import align

    if matching == "universe":
        return align.universe(models, symmetry)
    if matching == "merge_many":
        return align.merge_many(models, symmetry, seed=seed)
    options = {"seed": seed} if matching == "weights" else {}
    return align.match_to_reference(models, symmetry, method=matching, **options)


def _load_batches(batches: str, model: str | None) -> tuple[nn.Module, list[Any]]:
    """Return the network of --model and the batches of --batches, if the network and the loss can use them."""
    from merganser.analysis.alignments import mean_loss
    from merganser.analysis.landscape import segment
    from merganser.errors import InputError

    if model is None:
        raise InputError("--batches needs --model, the network that the batches are for")
    data, (network, _) = load_batches(batches), build_network(model)
    try:
        segment(network, network.state_dict(), network.state_dict(), data, mean_loss, points=2)
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"--batches {batches}: the network or its loss cannot use them: {error}") from error
    return network, data


def _show(report: dict[str, Any], as_json: bool) -> None:
    if as_json:
        emit(report)
        return
    from merganser.report.alignments import pair_table
    from merganser.report.landscapes import barrier_table

    objective = report["objective"]
    say(f"symmetry   {report['atoms']} groups of units that move on {report['tensors']} tensors")
    say(f"objective  {objective['before']:.6g} before, {objective['after']:.6g} after\n")
    say(f"{pair_table(report).text()}\n")
    if segments := report.get("landscape", {}).get("segments"):
        say(f"{barrier_table(segments).text()}\n")
    say(f"wrote {report['out']}: aligned/, {report['merged']}, permutations.safetensors, symmetry.json")
    for note in report["notes"]:
        say(f"note: {note}")
    if report["running_statistics"]:
        say("note: averaging shifts activations; recompute running statistics with merganser.align.repair")
