"""TextSpan for dual encoders: describe an expert's task singular vectors by the texts that span them best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from merganser.errors import InputError, one_of
from merganser.library.library import Library

#: Right singular vectors are in the layer's input space, left ones in its output space.
Side = Literal["right", "left"]


@dataclass(frozen=True)
class Concept:
    """A text, the share of the directions' energy that it explains, and the share explained by all texts up to it."""

    text: str
    share: float
    cumulative: float


def textspan(directions: Tensor, texts: Sequence[str], embeddings: Tensor, count: int = 5) -> list[Concept]:
    """Describe `directions` (rows in the texts' space, scaled by importance) greedily with `count` texts.

    Texts are projected onto the span of the directions. Then the text t with the largest variance ‖A t‖² over the rows
    of A is chosen repeatedly, and its direction is removed from A and from the texts. The projection shortens texts
    outside the span, so that they are not chosen for their length.
    """
    if embeddings.dim() != 2 or len(texts) != len(embeddings):
        raise InputError(
            f"{len(texts)} texts, but embeddings of shape {list(embeddings.shape)}; expected one row per text"
        )
    if directions.dim() != 2 or directions.shape[1] != embeddings.shape[1]:
        raise InputError(
            f"directions of shape {list(directions.shape)} and text embeddings of width {embeddings.shape[1]} do not "
            "share a space; give the projection from the layer to the joint space"
        )
    if not bool(embeddings.double().isfinite().all()):
        raise InputError("the embeddings of the texts contain NaN or infinite values")
    if count < 1:
        raise InputError(f"count {count}: ask for at least one text")
    a = directions.double()
    energy = float(a.square().sum())
    if energy == 0:
        raise InputError("all directions are zero; there is nothing to describe")
    _, lengths, rows = torch.linalg.svd(a, full_matrices=False)
    span = rows[lengths > 1e-10 * lengths[0]]
    candidates = torch.nn.functional.normalize(embeddings.double(), dim=1) @ span.T @ span
    found: list[Concept] = []
    for _ in range(min(count, len(texts), len(span))):
        lengths = candidates.norm(dim=1)
        variance = (candidates @ a.T).square().sum(1)
        best = int(variance.argmax())
        if lengths[best] <= 1e-8:
            break
        unit = candidates[best] / lengths[best]
        share = float((a @ unit).square().sum()) / energy
        found.append(Concept(texts[best], share, share + (found[-1].cumulative if found else 0.0)))
        a = a - torch.outer(a @ unit, unit)
        candidates = candidates - torch.outer(candidates @ unit, unit)
    return found


def decode(
    library: Library,
    expert: str,
    tensor: str,
    texts: Sequence[str],
    embeddings: Tensor,
    *,
    projection: str | Tensor | None = None,
    side: Side = "right",
    rank: int | None = None,
    count: int = 5,
) -> list[Concept]:
    """Describe the task singular vectors of one matrix, scaled by their singular values, by texts (TextSpan).

    Args:
        library: The experts.
        expert: The expert to describe.
        tensor: Name of the matrix.
        texts: Candidate descriptions.
        embeddings: Their embeddings, shape (texts, joint width).
        projection: Maps the layer's space to that of the embeddings: a matrix of shape (joint, layer), or the name of
            such a tensor of the base (`visual_projection.weight`). A matrix of shape (layer, joint) is transposed.
        side: `"right"` for the layer's input, `"left"` for its output.
        rank: How many singular vectors to use; all by default.
        count: How many texts to return.

    Returns:
        The texts in the order in which they were chosen, with the energy they explain.

    Raises:
        InputError: If the expert did not change the tensor, or the spaces do not fit.

    Example:
        >>> texts = ["a number", "a program"]
        >>> concepts = mg.routing.decode(library, "math", "2.weight", texts, torch.randn(2, 16), count=1)
    """
    one_of("side", side, Side)
    if rank is not None and rank < 1:
        raise InputError(f"rank {rank}: ask for at least one singular vector")
    factors = library.factors(expert, tensor)
    if factors is None:
        raise InputError(f"the expert {expert!r} did not change {tensor!r}: there is nothing to describe")
    if rank is not None:
        factors = factors.truncate(rank)
    vectors = factors.v if side == "right" else factors.u
    directions = (vectors * factors.s).T
    if projection is not None:
        matrix = (library.base.read(projection) if isinstance(projection, str) else projection).double()
        directions = _project(directions, matrix, embeddings.shape[-1])
    return textspan(directions, texts, embeddings, count)


def _project(directions: Tensor, matrix: Tensor, joint: int) -> Tensor:
    width = directions.shape[1]
    if tuple(matrix.shape) == (joint, width):
        return directions @ matrix.T
    if tuple(matrix.shape) == (width, joint):
        return directions @ matrix
    raise InputError(
        f"the projection has shape {list(matrix.shape)}; from width {width} to text embeddings of width {joint} it "
        f"must be {joint}×{width}"
    )
