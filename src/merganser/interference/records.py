"""What a survey finds: interference by matrix and block, similarity, and advice."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from merganser.notebooks import Shown

#: Shares of the components at which the kept energy is reported.
FRACTIONS = (0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class MatrixInterference:
    """Interference in one matrix.

    `sti` is as defined in the thesis. `normalized` lies between 0 (orthogonal) and 1 (identical experts); compare it
    with `chance`, its value for unrelated experts (see `sti.Overlap`). For each expert: `effective_rank`, the `energy`
    at the rank used, and the `energy_curve` at `FRACTIONS`. `pairs` is the normalised interference of every pair of
    experts. Procrustes errors are relative, (left, right); at full rank, the long side is measured only on request.
    """

    name: str
    block: str
    shape: tuple[int, int]
    rank: int
    sti: float
    normalized: float
    chance: float
    sti_after: float
    procrustes: tuple[float, float]
    procrustes_full: tuple[float | None, float | None]
    effective_rank: tuple[float, ...]
    energy: tuple[float, ...]
    energy_curve: tuple[tuple[float, ...], ...]
    pairs: tuple[tuple[float, ...], ...]

    @property
    def pair_chance(self) -> float:
        """The interference of two unrelated experts, k/√(d·m) at rank k, to compare `pairs` with."""
        return self.rank / math.sqrt(self.shape[0] * self.shape[1])


@dataclass(frozen=True)
class BlockInterference:
    """Interference in one block: sums of STI before and after TSV-Merge, means of normalised interference and of
    chance.
    """

    block: str
    matrices: int
    sti: float
    normalized: float
    chance: float
    sti_after: float


@dataclass(frozen=True)
class Advice:
    """One recommendation or fact, with its reason."""

    kind: Literal["norms", "twins", "opposed", "collision", "where", "method", "rank"]
    text: str
    experts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Survey(Shown):
    """The result of `survey`.

    Attributes:
        experts: Names of the experts.
        matrices: Interference in every matrix.
        blocks: Interference in every block.
        norms: Length of each task vector.
        cosine: Cosines of the whole task vectors, shape (experts, experts).
        pairs: Normalised interference of every pair of experts, averaged over the matrices.
        truncated: Whether the experts came from a library, so that spectra end at the stored rank.
        advice: Recommendations.
        left_out: By expert, tensors that the base lacks or has in another shape, such as heads.
        layers: For every stack measured only in part, the names of the measured layers and the number of all.

    Example:
        >>> survey = mg.interference.survey(base, experts)
        >>> [advice.text for advice in survey.advice]
    """

    experts: tuple[str, ...]
    matrices: tuple[MatrixInterference, ...]
    blocks: tuple[BlockInterference, ...]
    norms: tuple[float, ...]
    cosine: tuple[tuple[float, ...], ...]
    pairs: tuple[tuple[float, ...], ...]
    truncated: bool
    advice: tuple[Advice, ...] = ()
    left_out: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    layers: Mapping[str, tuple[tuple[str, ...], int]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {"fractions": list(FRACTIONS), **asdict(self)}
