"""The page of a survey of experts: tables and pictures."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from merganser.excerpts import list_some, shorten
from merganser.interference.advice import above_chance
from merganser.interference.records import FRACTIONS, MatrixInterference, Survey
from merganser.report.charts import Dot, Series, dot_plot, heat_map, line_chart
from merganser.report.contents import shorten_blocks
from merganser.report.page import Page
from merganser.report.tables import Table

#: Maximum singular vectors in a heat map over all experts: more would be smaller than a pixel on a phone.
HEAT_MAP_VECTORS = 96


@dataclass(frozen=True)
class HeatMap:
    """|UᵀU| of the top singular vectors of one matrix, `rank` per expert."""

    matrix: str
    rank: int
    left: Tensor


def loudest(found: Survey) -> MatrixInterference | None:
    """Return the matrix whose interference is furthest above chance."""
    return max(found.matrices, key=above_chance, default=None)


def describe_sampled(found: Survey) -> list[str]:
    """Return which layers of each stack were measured, if not all were."""
    return [
        f"{stack}: measured {len(names)} of {total} layers, evenly spread: "
        + ", ".join(name.rpartition(".")[2] for name in names)
        for stack, (names, total) in found.layers.items()
    ]


def describe_left_out(found: Survey) -> list[str]:
    """Return the tensors of each expert that could not be compared."""
    return [
        f"{name}: not compared, since the base has no tensor of that name and shape: {list_some(tensors, 3)}"
        for name, tensors in found.left_out.items()
    ]


def heat_map_rank(found: Survey, matrix: MatrixInterference) -> int:
    """Return the number of components per expert that a heat map can show."""
    return max(1, min(matrix.rank, HEAT_MAP_VECTORS // len(found.experts)))


def block_table(found: Survey) -> Table:
    rows = [
        [b.block, b.matrices, b.sti, round(b.sti_after, 9), b.normalized, b.chance, above_chance(b)]
        for b in found.blocks
    ]
    columns = ["block", "matrices", "STI", "after TSV-Merge", "normalised", "by chance", "× chance"]
    return Table(columns, rows, "Singular task interference by block")


def matrix_table(found: Survey, limit: int | None = None) -> Table:
    """Return every matrix, or those with the most interference relative to chance, in the order of the model."""
    loud = sorted(map(above_chance, found.matrices), reverse=True)[: limit or None]
    matrices = [m for m in found.matrices if loud and above_chance(m) >= loud[-1]]
    rows = [
        [
            m.name,
            "×".join(map(str, m.shape)),
            m.rank,
            m.sti,
            round(m.sti_after, 9),
            m.normalized,
            above_chance(m),
            _mean(m.procrustes),
            _mean(m.effective_rank),
            _mean(m.energy),
        ]
        for m in matrices
    ]
    columns = [
        *("matrix", "shape", "rank", "STI", "after TSV-Merge", "normalised", "× chance"),
        *("Procrustes error", "effective rank", "energy kept"),
    ]
    every = (
        "Every matrix"
        if len(matrices) == len(found.matrices)
        else f"The {len(matrices)} matrices with the most interference relative to chance"
    )
    return Table(columns, rows, f"{every} (means over experts)")


def cosine_table(found: Survey) -> Table:
    rows = [
        [name, *(round(value, 3) for value in values)] for name, values in zip(found.experts, found.cosine, strict=True)
    ]
    return Table(["cosine", *found.experts], rows, "Cosine of task vectors")


def expert_table(found: Survey) -> Table:
    """Return for each expert its norm, effective rank, and the energy kept at the rank used and at shares of
    components.
    """
    rows = [
        [
            name,
            found.norms[t],
            _mean([m.effective_rank[t] for m in found.matrices]),
            _mean([m.energy[t] for m in found.matrices]),
            *energy_curve(found, t),
        ]
        for t, name in enumerate(found.experts)
    ]
    columns = ["expert", "norm", "effective rank", "energy kept", *(f"{share:.0%}" for share in FRACTIONS)]
    held = ", of what the library stores" if found.truncated else ""
    measured = f"energy kept at the rank used, and at a share of the components (means over matrices{held})"
    caption = f"Norms of the task vectors; {measured}"
    return Table(columns, rows, caption)


def energy_curve(found: Survey, expert: int) -> list[float]:
    """Return the mean share of an expert's energy over its matrices, at each of FRACTIONS."""
    return [_mean([m.energy_curve[expert][i] for m in found.matrices]) for i in range(len(FRACTIONS))]


def fill(page: Page, found: Survey, overlap: HeatMap | None = None) -> None:
    """Add advice, interference by layer, similarity and spectra: each picture with its table."""
    if found.advice:
        page.heading("Advice")
        page.items(advice.text for advice in found.advice)
    if not found.matrices:
        page.text("No matrix differs from the base, so nothing can interfere.")
        return
    if found.truncated:
        page.text("The experts come from a library: their spectra end at the stored rank.")
    if len(found.experts) > 1:
        page.heading("Where experts interfere")
        page.chart(pair_chart(found))
        page.chart(sti_chart(found))
        page.chart(level_chart(found))
        page.add(block_table(found))
        page.heading("Similarity of experts")
        page.chart(cosine_chart(found))
        page.add(cosine_table(found))
        if overlap is not None:
            page.chart(overlap_chart(found, overlap))
    page.heading("Spectra")
    page.chart(energy_chart(found))
    page.add(expert_table(found))
    whole = " that the library stores" if found.truncated else ""
    page.text(
        f"Energy kept: the share of the squared singular values{whole}, a mean over matrices with equal weights. "
        "The page of a library gives the share over all changes of an expert together, which large changes dominate."
    )
    page.chart(rank_chart(found))
    page.add(matrix_table(found))


def pair_chart(found: Survey) -> str:
    """Return a heat map of layers × pairs of experts: their interference as a multiple of chance."""
    short = _short(found.experts)
    pairs = list(itertools.combinations(range(len(short)), 2))
    inside = {b.block: [m for m in found.matrices if m.block == b.block] for b in found.blocks}
    values = [[_mean([m.pairs[i][j] / m.pair_chance for m in each]) for i, j in pairs] for each in inside.values()]
    caption = "Interference of every two experts in every layer; 1 is that of unrelated experts."
    names = [f"{short[i]} – {short[j]}" for i, j in pairs]
    high = max(2.0, *(value for row in values for value in row))
    rows = shorten_blocks(list(inside))
    return heat_map(values, rows, names, low=1.0, high=high, log=True, y="layer", caption=caption)


def sti_chart(found: Survey) -> str:
    names = shorten_blocks([block.block for block in found.blocks])
    dots = [
        Dot(name, value, series=i)
        for name, block in zip(names, found.blocks, strict=True)
        for i, value in enumerate((block.sti, block.sti_after))
    ]
    caption = "Singular task interference (STI) of each block before and after TSV-Merge, on a logarithmic scale."
    if not any(block.sti_after > 0 for block in found.blocks):
        caption += " After TSV-Merge it is 0 everywhere."
    return dot_plot(dots, "STI", legend=["before", "after TSV-Merge"], log=True, caption=caption)


def level_chart(found: Survey) -> str:
    names = shorten_blocks([block.block for block in found.blocks])
    lines = [
        Series("measured", names, [block.normalized for block in found.blocks]),
        Series("by chance", names, [block.chance for block in found.blocks], dots=False, dotted=True),
    ]
    caption = "Normalised: 0 for orthogonal experts, 1 for identical ones, independent of size."
    return line_chart(lines, "block", "normalised interference", include=[0], caption=caption)


def cosine_chart(found: Survey) -> str:
    labels = _short(found.experts)
    return heat_map(found.cosine, labels, labels, high=1, caption="Cosine of whole task vectors.")


def overlap_chart(found: Survey, overlap: HeatMap) -> str:
    labels = _short(found.experts)
    caption = (
        f"|UᵀU| of {overlap.matrix}, the matrix with the most interference relative to chance "
        f"({max(map(above_chance, found.matrices)):.1f}×): the top {overlap.rank} left singular vectors of every "
        "expert. Off-diagonal blocks are what TSV-Merge removes."
    )
    return heat_map(overlap.left.tolist(), labels, labels, high=1, caption=caption)


def energy_chart(found: Survey) -> str:
    lines = [Series(name, FRACTIONS, energy_curve(found, expert)) for expert, name in enumerate(found.experts)]
    caption = "Share of the energy of task matrices in a share of their components."
    return line_chart(lines, "share of components", "energy kept", log_x=True, include=[1], caption=caption)


def rank_chart(found: Survey) -> str:
    blocks = [block.block for block in found.blocks]
    lines = [
        Series(
            name,
            shorten_blocks(blocks),
            [_mean([m.effective_rank[expert] for m in found.matrices if m.block == b]) for b in blocks],
        )
        for expert, name in enumerate(found.experts)
    ]
    caption = "Effective rank of task matrices, mean over each block."
    return line_chart(lines, "block", "effective rank", caption=caption)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _short(names: Sequence[str]) -> list[str]:
    return [shorten(name, 14) for name in names]
