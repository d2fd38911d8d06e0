"""`merganser align`: networks trained apart, brought into one space."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from merganser.cli.factories import build_network
from merganser.cli.naming import name_checkpoints
from merganser.report.tables import Table

if TYPE_CHECKING:
    from torch import Tensor

    from merganser.align import Symmetry, Universe

METHODS = ("universe", "weights", "frank_wolfe", "merge_many")


def command(
    checkpoints: Annotated[list[str], typer.Argument(metavar="CKPT...", help="Two or more: paths, or NAME=PATH.")],
    out: Annotated[Path, typer.Option("--out", help="Directory to be made.")],
    model: Annotated[
        str | None,
        typer.Option(help="pkg.module:factory, a function that returns the network, or (network, example_inputs)."),
    ] = None,
    shape: Annotated[str | None, typer.Option(help="Shape of an example input, e.g. 1x3x32x32.")] = None,
    method: Annotated[
        str, typer.Option(help="universe (C²M³), merge_many, or to the first: weights, frank_wolfe.")
    ] = "universe",
    permutations: Annotated[
        Path | None, typer.Option(help="Use the permutations.safetensors of an earlier run; no matching.")
    ] = None,
    seed: Annotated[int, typer.Option(help="For weights and merge_many, which go through layers at random.")] = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on standard output.")] = False,
) -> None:
    """Align checkpoints of one architecture and average them in the common space.

    The permutation symmetries are derived from the network itself and self-tested; no data is needed. OUT gets
    aligned/NAME.safetensors for every checkpoint (the same function as before, in the common space),
    merged.safetensors, permutations.safetensors, symmetry.json and alignment.json (what is printed); `merganser report
    OUT` makes a page of them.
    """
    from merganser.errors import InputError, did_you_mean

    named = name_checkpoints(checkpoints)
    if len(named) < 2:
        raise InputError("align needs at least two checkpoints")
    if method not in METHODS:
        raise InputError(f"--method {method}: unknown{did_you_mean(method, METHODS)}")
    if model is None and permutations is None:
        raise InputError("--model pkg.module:factory is needed to derive the symmetries (or --permutations of a run)")
    if out.exists() and not overwrite:
        raise InputError(f"{out} exists; --overwrite replaces it")
    _align(named, out, model, shape, method, permutations, seed, as_json)


def _align(
    named: Mapping[str, str],
    out: Path,
    model: str | None,
    shape: str | None,
    method: str,
    permutations: Path | None,
    seed: int,
    as_json: bool,
) -> None:
    from merganser import align
    from merganser.align.symmetries import Symmetry
    from merganser.checkpoints import open as open_checkpoint

    opened = [open_checkpoint(path) for path in named.values()]
    if permutations is not None:
        symmetry = Symmetry.from_json(_header(permutations))
    else:
        assert model is not None
        symmetry = align.symmetry(*build_network(model, shape))
    states = [_complete(checkpoint.state_dict(), symmetry) for checkpoint in opened]
    if permutations is not None:
        found = align.Universe.load(permutations, states)
    elif method == "universe":
        found = align.universe(states, symmetry)
    elif method == "merge_many":
        found = align.merge_many(states, symmetry, seed=seed)
    else:
        options = {"seed": seed} if method == "weights" else {}
        found = align.match_to_reference(states, symmetry, method=method, **options)
    stored = [{*checkpoint.names(), *checkpoint.aliases()} for checkpoint in opened]
    report = {"method": "given" if permutations else method, **_report(list(named), found)}
    _write(found, list(named), stored, report, out)
    _show({**report, "out": str(out)}, as_json)


def _header(path: Path) -> str:
    """The symmetry in the header of saved permutations."""
    from safetensors import SafetensorError, safe_open

    from merganser.errors import InputError

    try:
        with safe_open(path, framework="numpy") as file:
            text = (file.metadata() or {}).get("symmetry")
    except (OSError, SafetensorError) as error:
        raise InputError(f"--permutations {path}: {error}") from None
    if text is None:
        raise InputError(f"--permutations {path}: no symmetry in its header; was it written by `merganser align`?")
    return str(text)


def _complete(state: dict[str, Tensor], symmetry: Symmetry) -> dict[str, Tensor]:
    """With every tied name: files often hold only one of them."""
    for alias, name in symmetry.aliases.items():
        for missing, present in ((alias, name), (name, alias)):
            if missing not in state and present in state:
                state[missing] = state[present]
    return state


def _report(names: Sequence[str], found: Universe) -> dict[str, Any]:
    from merganser.align.permutations import identity
    from merganser.align.solver import objective_of
    from merganser.analysis.similarity import weight_similarity

    before = weight_similarity(dict(zip(names, found.models, strict=True)))
    after = weight_similarity({name: found.to_universe(i) for i, name in enumerate(names)})
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
        "running_statistics": any(name.endswith("running_var") for name in found.symmetry.buffers),
    }


def _write(
    found: Universe, names: Sequence[str], stored: Sequence[set[str]], report: Mapping[str, Any], out: Path
) -> None:
    """Everything into a directory beside OUT, which takes its name when it is complete."""
    from safetensors.torch import save_file

    staging = out.with_name(f"{out.name}.partial")
    if staging.exists():
        shutil.rmtree(staging)
    (staging / "aligned").mkdir(parents=True)

    def save(name: str, state: Mapping[str, Tensor], kept: set[str]) -> None:
        tensors = {key: tensor.contiguous() for key, tensor in state.items() if key in kept}
        save_file(tensors, staging / f"{name}.safetensors", {"format": "pt"})

    for position, name in enumerate(names):
        save(f"aligned/{name}", found.to_universe(position), stored[position])
    save("merged", found.merged(), stored[0])
    found.save(staging / "permutations.safetensors")
    (staging / "symmetry.json").write_text(found.symmetry.to_json() + "\n", encoding="utf-8")
    (staging / "alignment.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if out.is_dir():
        shutil.rmtree(out)
    staging.rename(out)


def _show(report: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(report))
        return
    objective = report["objective"]
    typer.echo(f"symmetry   {report['atoms']} free permutations on {report['tensors']} tensors")
    rows: list[tuple[object, ...]] = [("objective", objective["before"], objective["after"])]
    for pair in report["pairs"]:
        both = " – ".join(pair["models"])
        rows.append((f"cosine {both}", pair["cosine"]["before"], pair["cosine"]["after"]))
        rows.append((f"distance {both}", pair["distance"]["before"], pair["distance"]["after"]))
    typer.echo(Table(("", "before", "after"), rows).text())
    typer.echo(f"wrote {report['out']}: aligned/, merged.safetensors, permutations.safetensors, symmetry.json")
    if report["running_statistics"]:
        typer.echo("note: averaging shifts activations; recompute running statistics with merganser.align.repair")
