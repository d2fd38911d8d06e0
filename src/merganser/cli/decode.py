"""`merganser decode`: describe task singular vectors with text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from merganser.cli.options import Json, LibraryPath, MovedBase
from merganser.cli.output import emit, say
from merganser.cli.progress import ProgressReporter

if TYPE_CHECKING:
    from torch import Tensor

    from merganser.routing.textspan import Side


def command(
    library: LibraryPath,
    expert: Annotated[str, typer.Argument(metavar="NAME", help="Expert to describe.")],
    tensors: Annotated[list[str], typer.Argument(metavar="TENSOR", help="Matrices to describe.")],
    texts: Annotated[Path, typer.Option(metavar="FILE", help="Candidate texts, one per line.")],
    embeddings: Annotated[
        Path, typer.Option(metavar="FILE", help="Embeddings of the texts: .npy, or .safetensors with one tensor.")
    ],
    projection: Annotated[
        str | None, typer.Option(metavar="TENSOR", help="Tensor of the base that maps the layer to the joint space.")
    ] = None,
    side: Annotated[
        str, typer.Option(help="Singular vectors to describe: right (the layer's input) or left (its output).")
    ] = "right",
    rank: Annotated[int | None, typer.Option(min=1, help="Number of singular components.")] = None,
    count: Annotated[int, typer.Option(min=1, help="Number of texts per matrix.")] = 5,
    base: MovedBase = None,
    as_json: Json = False,
) -> None:
    """Describe with text what an expert changed.

    TextSpan, for dual encoders such as CLIP.
    """
    from merganser.library.library import Library
    from merganser.routing.textspan import decode

    candidates, table = _read_texts(texts), _read_embeddings(embeddings)
    opened = Library(library, base)
    with ProgressReporter("decoding", "matrices") as reporter:
        for tensor in tensors:
            reporter.step(tensor, len(tensors))
            found = decode(
                opened,
                expert,
                tensor,
                candidates,
                table,
                projection=projection,
                side=cast("Side", side),
                rank=rank,
                count=count,
            )
            if as_json:
                emit({"expert": expert, "tensor": tensor, "texts": found})
                continue
            say(f"{expert}  {tensor}")
            for concept in found:
                say(f"  {concept.share:6.1%}  {concept.text}")


def _read_texts(path: Path) -> list[str]:
    from merganser.errors import InputError, reading

    if not path.is_file():
        raise InputError(f"{path}: no such file")
    with reading(path):
        content = path.read_text(encoding="utf-8")
    lines = [line.strip() for line in content.splitlines() if line.strip()]
    if not lines:
        raise InputError(f"{path}: contains no texts")
    return lines


def _read_embeddings(path: Path) -> Tensor:
    from merganser.checkpoints.opening import open as open_checkpoint
    from merganser.errors import InputError

    if not path.is_file():
        raise InputError(f"{path}: no such file")
    if path.suffix == ".npy":
        return _read_array(path)
    opened = open_checkpoint(path)
    if len(opened.names()) != 1:
        raise InputError(f"{path}: has {len(opened.names())} tensors; expected one tensor with a row per text")
    return opened.read(opened.names()[0])


def _read_array(path: Path) -> Tensor:
    import numpy as np
    import torch

    from merganser.errors import InputError
    from merganser.evolve.numpy_files import read_arrays

    found = read_arrays(path).get("")
    if found is None:
        raise InputError(f"{path}: contains several arrays; expected one array with a row per text")
    return torch.from_numpy(found.astype(np.float64))
