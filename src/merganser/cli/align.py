"""`merganser align`: bring networks that were trained independently into one space."""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from merganser.cli.factories import build_network, derive_from_config, derive_symmetry, load_batches
from merganser.cli.naming import name_checkpoints
from merganser.cli.options import AllowUnused, Json, NetworkOutputs, Out, Overwrite, Seed, Shape
from merganser.cli.output import emit, say
from merganser.cli.progress import ProgressReporter
from merganser.plain import plain

if TYPE_CHECKING:
    from torch import Tensor

    from merganser.align import Symmetry, Universe
    from merganser.checkpoints import Checkpoint

MATCHINGS = ("universe", "weights", "frank_wolfe", "merge_many")
#: Points of a segment, and of each side of a plane, at which the loss is measured.
POINTS = 11


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
    from merganser.engine.directories import paths_in
    from merganser.engine.publishing import check_out
    from merganser.errors import InputError, one_of

    named = name_checkpoints(checkpoints)
    if len(named) < 2:
        raise InputError("align needs at least two checkpoints")
    one_of("--matching", matching, MATCHINGS)
    one_of("--kind", kind, ("permutation", "orthogonal"))
    if batches is not None and model is None:
        raise InputError("--batches needs --model, the network that the batches are for")
    inputs = [path for reference in named.values() for path in paths_in(reference)]
    check_out(out, overwrite, [*inputs, *([permutations] if permutations else [])])
    options = {"kind": kind, "outputs": outputs or None, "allow_unused": allow_unused}

    def derive(first: Checkpoint) -> Symmetry:
        if model is not None:
            return derive_symmetry(model, shape, **options)
        found, tested = derive_from_config(first, "reuse --permutations of an earlier run", **options)
        if not tested:
            say("note: the symmetry of this large network was derived without a self-test", sys.stderr)
        return found

    measure = partial(_landscape, model=model or "", data=_load_batches(batches, model or "")) if batches else None
    _align(named, out, overwrite, derive, matching, permutations, seed, as_json, measure)


def _align(
    named: Mapping[str, str],
    out: Path,
    overwrite: bool,
    derive: Callable[[Checkpoint], Symmetry],
    matching: str,
    permutations: Path | None,
    seed: int,
    as_json: bool,
    measure: Callable[[list[str], Universe], dict[str, Any]] | None,
) -> None:
    from merganser import align
    from merganser.checkpoints import open as open_checkpoint
    from merganser.engine.directories import check_replaceable
    from merganser.engine.publishing import publish

    opened = [open_checkpoint(path) for path in named.values()]
    check_replaceable(out, [file for checkpoint in opened for file in checkpoint.files()])
    _check_shapes(opened)
    steps = 5 if measure else 4
    with ProgressReporter("aligning", "steps") as reporter:
        if permutations is not None:
            reporter.step("reading", steps)
            found = align.Universe.load(permutations, opened)
        else:
            reporter.step("deriving the symmetry", steps)
            symmetry = derive(opened[0])
            reporter.step("matching", steps)
            found = _match(opened, symmetry, matching, seed)
        reporter.step("comparing", steps)
        stored = [once({*checkpoint.names(), *checkpoint.aliases()}, found.symmetry) for checkpoint in opened]
        report = {"method": "given" if permutations else matching, **_report(list(named), found)}
        if measure is not None:
            reporter.step("measuring barriers", steps)
            report["landscape"] = measure(list(named), found)
        reporter.step("writing", steps)
        models = dict(zip(named, opened, strict=True))
        publish(out, lambda directory: _write(found, models, stored, report, directory), overwrite=overwrite)
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


def once(names: set[str], symmetry: Symmetry) -> set[str]:
    """Return the stored names without those that are tied to another stored name."""
    first: dict[str, str] = {}
    for name in sorted(names, key=lambda name: (name in symmetry.aliases, name)):
        first.setdefault(symmetry.aliases.get(name, name), name)
    return set(first.values())


def _report(names: Sequence[str], found: Universe) -> dict[str, Any]:
    from merganser.align.permutations import identity
    from merganser.align.solver import objective_of
    from merganser.analysis.similarity import weight_similarity

    def untied(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in state.items() if name not in found.symmetry.aliases}

    before = weight_similarity({name: untied(found.models[i]) for i, name in enumerate(names)})
    after = weight_similarity({name: untied(found.to_universe(i)) for i, name in enumerate(names)})
    untouched = [identity(found.symmetry)] * len(found)
    return {
        "models": list(names),
        "atoms": len(found.symmetry.atoms),
        "tensors": len(found.symmetry.objective),
        "objective": {"before": objective_of(found.models, untouched, found.symmetry), "after": found.objective},
        "cycle_error": found.cycle_error(),
        "pairs": [
            {
                "models": [names[a], names[b]],
                "cosine": {"before": before.cosine[a][b], "after": after.cosine[a][b]},
                "distance": {"before": before.distance[a][b], "after": after.distance[a][b]},
            }
            for a in range(len(names))
            for b in range(a + 1, len(names))
        ],
        "notes": list(found.notes),
        "running_statistics": any(name.endswith("running_var") for name in found.symmetry.buffers),
    }


def _load_batches(text: str, model: str) -> list[Any]:
    """Return the batches that --batches names, if the network and the loss can use them."""
    from merganser.analysis.landscape import segment
    from merganser.errors import InputError

    data, (network, _) = load_batches(text), build_network(model)
    try:
        segment(network, network.state_dict(), network.state_dict(), data, mean_loss, points=2)
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"--batches {text}: the network or its loss cannot use them: {error}") from error
    return data


def _landscape(names: list[str], found: Universe, *, model: str, data: Sequence[Any]) -> dict[str, Any]:
    """Return the loss between every two networks, and over the plane of the first three, before and after."""
    from merganser.analysis.landscape import plane, segment
    from merganser.errors import InputError

    network, _ = build_network(model)
    spaces = {"before": found.models, "after": [found.to_universe(i) for i in range(len(found))]}
    measured: dict[str, Any] = {
        "segments": [
            {"models": [names[a], names[b]]}
            | {
                when: segment(network, states[a], states[b], data, mean_loss, points=POINTS).to_dict()
                for when, states in spaces.items()
            }
            for a, b in itertools.combinations(range(len(names)), 2)
        ]
    }
    if len(names) > 2:
        with contextlib.suppress(InputError):  # networks on one line, such as copies, have no plane
            measured["plane"] = {"models": names[:3]} | {
                when: plane(network, states[:3], data, mean_loss, resolution=POINTS).to_dict()
                for when, states in spaces.items()
            }
    return measured


def mean_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy for targets that are classes, else the mean squared error."""
    from torch.nn import functional

    if targets.is_floating_point():
        return functional.mse_loss(outputs, targets)
    return functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def _write(
    found: Universe,
    models: Mapping[str, Checkpoint],
    stored: Sequence[set[str]],
    report: Mapping[str, Any],
    directory: Path,
) -> None:
    """Write the networks, as directories with their config if they have one, and what was found."""
    from safetensors.torch import save_file

    from merganser.checkpoints.memory import StateDict
    from merganser.recipes.saving import save as save_directory

    def save(name: str, state: Mapping[str, Tensor], kept: set[str], model: Checkpoint) -> None:
        tensors = {key: tensor.contiguous() for key, tensor in state.items() if key in kept}
        if not has_config(model):
            save_file(tensors, directory / f"{name}.safetensors", {"format": "pt"})
            return
        view = StateDict(tensors, model.label)
        view.directory = model.directory
        save_directory(view, directory / name)

    (directory / "aligned").mkdir()
    for position, (name, model) in enumerate(models.items()):
        save(f"aligned/{name}", found.to_universe(position), stored[position], model)
    save("merged", found.merged(), stored[0], next(iter(models.values())))
    found.save(directory / "permutations.safetensors")
    (directory / "symmetry.json").write_text(found.symmetry.to_json() + "\n", encoding="utf-8")
    (directory / "alignment.json").write_text(json.dumps(plain(report), indent=1) + "\n", encoding="utf-8")


def has_config(model: Checkpoint) -> bool:
    """Return whether a checkpoint has a config beside its weights, as models of transformers have."""
    return model.directory is not None and (model.directory / "config.json").is_file()


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
