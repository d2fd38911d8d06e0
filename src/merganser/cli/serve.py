"""`merganser serve`: serve an input-adaptive model over an expert library by HTTP."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from merganser.cli.options import Json, LibraryPath, Model, MovedBase
from merganser.cli.output import emit, say

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from merganser.routing.adaptive import AdaptiveModel
    from merganser.routing.heads import HeadLike, HeadScore
    from merganser.routing.routers import Normalize, RoutingSource


def command(
    library: LibraryPath,
    model: Model,
    heads: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Directory with one head per expert: NAME.safetensors with weight and bias."),
    ] = None,
    labels: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="JSON file with the names of each head's classes; heads with the same names answer one question.",
        ),
    ] = None,
    encode: Annotated[
        str | None,
        typer.Option(metavar="MODULE:FUNCTION", help="Function that turns a request's inputs into the model's inputs."),
    ] = None,
    features: Annotated[
        str | None,
        typer.Option(metavar="MODULE:FUNCTION", help="Function (output, inputs) -> features that the heads read."),
    ] = None,
    layer: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Linear layer to route at; may be repeated.")
    ] = None,
    source: Annotated[
        str, typer.Option(help="Model that computes the routing activations: fixed (the merge) or base.")
    ] = "fixed",
    normalize: Annotated[
        str, typer.Option(help="Residuals to weights: softmax, or zscore (standardise first).")
    ] = "zscore",
    score: Annotated[
        str, typer.Option("--head-score", help="Compare heads by logit, probability or posterior.")
    ] = "logit",
    threshold: Annotated[float, typer.Option(min=0, max=1, help="Smallest weight of a chosen expert (η).")] = 0.2,
    top: Annotated[int, typer.Option(min=1, help="Maximum experts per input (K).")] = 3,
    redundancy: Annotated[float, typer.Option(min=-1, max=1, help="Maximum cosine within the fixed merge (ε).")] = 0.3,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on.")] = 8000,
    max_batch: Annotated[int, typer.Option(min=1, help="Maximum samples in a batch.")] = 64,
    max_samples: Annotated[int, typer.Option(min=1, help="Maximum samples per request.")] = 64,
    max_queue: Annotated[int, typer.Option(min=1, help="Maximum samples in the queue.")] = 512,
    max_body: Annotated[str, typer.Option(metavar="SIZE", help="Maximum size of a request, e.g. 1MB.")] = "1MiB",
    wait: Annotated[
        float, typer.Option(min=0, help="Milliseconds to wait for more requests before computing a batch.")
    ] = 5.0,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds until a request times out.")] = 30.0,
    header_timeout: Annotated[
        float, typer.Option(min=0.001, help="Seconds until the headers of a request time out.")
    ] = 10.0,
    max_connections: Annotated[int, typer.Option(min=1, help="Maximum simultaneous connections.")] = 512,
    token: Annotated[
        str | None,
        typer.Option(envvar="MERGANSER_TOKEN", help="Require `Authorization: Bearer TOKEN`; prefer the variable."),
    ] = None,
    base: MovedBase = None,
    as_json: Json = False,
) -> None:
    """Serve a library of experts over HTTP.

    Every request is routed to its experts and its head.
    """
    from merganser.errors import MerganserError, require
    from merganser.routing.batching import Limits
    from merganser.routing.listening import create_server
    from merganser.routing.serving import create_app
    from merganser.units import parse_size

    require("uvicorn", "serve")
    limits = Limits(
        body_bytes=parse_size(max_body),
        samples=max_samples,
        batch=max_batch,
        queue=max_queue,
        wait=wait / 1000,
        timeout=timeout,
        header_seconds=header_timeout,
        connections=max_connections,
    )
    adaptive = build_model(
        library,
        model,
        heads,
        base,
        labels=labels,
        features=features,
        layer=layer or None,
        source=cast("RoutingSource", source),
        normalize=cast("Normalize", normalize),
        score=cast("HeadScore", score),
        threshold=threshold,
        top=top,
        redundancy=redundancy,
    )
    app = create_app(adaptive, encode=_function(encode, "--encode"), limits=limits, token=token)
    if as_json:
        emit({"event": "serving", "url": f"http://{host}:{port}", "experts": list(adaptive.library.experts)})
    else:
        say(f"serving {', '.join(adaptive.library.experts)} at http://{host}:{port}", sys.stderr)
    server = create_server(app, host=host, port=port, limits=limits)
    server.run()
    if not server.started:
        raise MerganserError("the server could not start")


def build_model(
    library: Path,
    model: str,
    heads: Path | None,
    base: str | None,
    *,
    labels: Path | None = None,
    features: str | None = None,
    **options: Any,
) -> AdaptiveModel:
    """Return the adaptive model of a command line: the factory's network with the base's weights."""
    from merganser.cli.factories import build_network
    from merganser.errors import InputError
    from merganser.library.library import Library
    from merganser.routing.adaptive import AdaptiveModel

    if labels is not None and heads is None:
        raise InputError("--labels names the classes of heads; give them with --heads")
    opened = Library(library, base)
    found = None if heads is None else read_heads(heads, opened.experts)
    if found is not None and labels is not None:
        found = name_classes(found, read_labels(labels))
    module, _ = build_network(model)
    return AdaptiveModel(
        module, opened, cast(Any, found), features=_function(features, "--features"), load_base=True, **options
    )


def read_heads(directory: Path, tasks: tuple[str, ...]) -> dict[str, HeadLike]:
    """Read `NAME.safetensors` or `NAME/head.safetensors` for every expert."""
    from merganser.checkpoints.opening import open as open_checkpoint
    from merganser.errors import InputError

    found: dict[str, HeadLike] = {}
    for task in tasks:
        paths = [directory / f"{task}.safetensors", directory / task / "head.safetensors"]
        there = [path for path in paths if path.is_file()]
        if not there:
            raise InputError(
                f"{directory}: no head for {task!r}; looked for {paths[0].name} and {task}/head.safetensors"
            )
        found[task] = {name: tensor.clone() for name, tensor in open_checkpoint(there[0]).state_dict().items()}
    return found


def _function(text: str | None, option: str) -> Any:
    from merganser.evaluate.references import import_function

    return None if text is None else import_function(text, option)


def name_classes(heads: Mapping[str, HeadLike], labels: Mapping[str, Sequence[str]]) -> dict[str, HeadLike]:
    """Return the heads, with names of the classes for those in `labels`."""
    from merganser.errors import InputError, did_you_mean
    from merganser.routing.heads import NamedHead

    for task in labels:
        if task not in heads:
            raise InputError(f"--labels: names for {task!r}, which is not an expert{did_you_mean(task, heads)}")
    return {task: NamedHead(cast(Any, head), labels[task]) if task in labels else head for task, head in heads.items()}


def read_labels(path: Path) -> dict[str, list[str]]:
    """Read the names of classes: `{"EXPERT": ["NAME", ...], ...}`."""
    from merganser.errors import InputError
    from merganser.strict_json import read_json

    try:
        content = read_json(path)
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot read the labels: {error}") from None
    if not isinstance(content, dict) or not all(_is_list_of_text(names) for names in content.values()):
        raise InputError(f'{path}: labels must look like {{"EXPERT": ["no", "yes"], ...}}')
    return content


def _is_list_of_text(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)
