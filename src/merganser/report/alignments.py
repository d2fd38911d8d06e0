"""The page of an alignment: loss barriers and similarity before and after, and which units moved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from merganser.align.ascent import Step
from merganser.align.permutations import Permutations
from merganser.align.records import Record
from merganser.analysis.similarity import weight_similarity
from merganser.checkpoints import open as open_checkpoint
from merganser.report.charts import Series, line_chart
from merganser.report.contents import contents, distance_table, facts
from merganser.report.landscapes import TIMES, barrier_table, barrier_verdict, plane_chart, segment_chart
from merganser.report.page import Page
from merganser.report.sidecars import read_json
from merganser.report.tables import Table

#: Files that `merganser align` writes besides weights.
PERMUTATIONS, SUMMARY = "permutations.safetensors", "alignment.json"
#: Pairs of networks whose segment is drawn; the table has all.
CHARTS = 6


def fill(page: Page, directory: Path, check: bool) -> dict[str, Any]:
    """Fill the page from the permutations, the aligned networks and the summary of the run, if there is one."""
    record = Record.load(directory / PERMUTATIONS)
    symmetry, moved = record.symmetry, [_measure_moved(permutations) for permutations in record.permutations]
    aligned = {path.name.removesuffix(".safetensors"): path for path in sorted((directory / "aligned").iterdir())}
    summary = read_json(directory / SUMMARY)
    method = f" by {summary['method']}" if "method" in summary else ""
    lines = [f"{len(aligned)} networks aligned{method}: {', '.join(summary.get('models', aligned))}"]
    lines.append(f"{len(symmetry.atoms)} groups of units that move on {len(symmetry.objective)} tensors")
    lines.append(f"objective {record.objective:.6g}")
    if "cycle_error" in summary:
        lines.append(f"cycle error {summary['cycle_error']:g}")
    page.items(lines)
    if isinstance(landscape := summary.get("landscape"), dict):
        _add_barriers(page, landscape)
    page.heading("Similarity")
    if summary.get("pairs"):
        page.add(pair_table(summary))
    else:
        found = weight_similarity({name: str(path) for name, path in aligned.items()})
        page.add(distance_table(found, "Cosine and distance of all weights, aligned"))
    if len(record.trace) > 1:
        page.heading("The search")
        page.chart(_draw_climb(record.trace))
    page.heading("What moved")
    rows = [[name, atom.size, *(shares[name] for shares in moved)] for name, atom in symmetry.atoms.items()]
    names = summary.get("models") or [f"network {number}" for number in range(1, len(moved) + 1)]
    if any(share for _, _, *shares in rows for share in shares):
        page.add(Table(["permutation", "units", *names], rows, "Share of the units that moved"))
    else:
        page.text(f"No unit moved in any of the {len(rows)} groups: the networks were in the same order already.")
    merged = next((path for path in (directory / "merged.safetensors", directory / "merged") if path.exists()), None)
    if merged is not None:
        page.heading("Their average")
        page.items(facts(contents(open_checkpoint(merged), check=check)))
    return {"kind": "alignment", "models": list(names), "permutations": len(symmetry.atoms), **_select_results(summary)}


def _add_barriers(page: Page, landscape: dict[str, Any]) -> None:
    """Add the loss on the way between networks, before and after alignment, and over the plane of the first three."""
    page.heading("Loss between the networks")
    page.text(barrier_verdict(landscape["segments"]))
    for each in landscape["segments"][:CHARTS]:
        first, second = each["models"]
        page.chart(segment_chart({when: each[when] for when in TIMES}, f"From {first} to {second}."))
    page.add(barrier_table(landscape["segments"]))
    if "plane" in landscape:
        plane = landscape["plane"]
        losses = [loss for when in TIMES for row in plane[when]["losses"] for loss in row]
        for when in TIMES:
            caption = f"The plane through {', '.join(plane['models'])}, {when} alignment."
            page.chart(plane_chart(plane[when], plane["models"], caption, losses))


def _measure_moved(permutations: Permutations) -> dict[str, float]:
    """Return the share of units that each permutation moves."""
    return {name: float(np.mean(index != np.arange(index.shape[-1]))) for name, index in permutations.items()}


def pair_table(summary: Mapping[str, Any]) -> Table:
    """Return the similarity of every pair of networks before and after."""
    rows = [
        [
            " – ".join(pair["models"]),
            *(pair[key][when] for key in ("cosine", "distance") for when in ("before", "after")),
        ]
        for pair in summary["pairs"]
    ]
    columns = ["networks", "cosine before", "cosine after", "distance before", "distance after"]
    return Table(columns, rows, "Cosine and distance of all weights")


def _draw_climb(trace: Sequence[Step]) -> str:
    lines = []
    for run in dict.fromkeys(step.run for step in trace):
        steps = [(number, step.objective) for number, step in enumerate(trace, 1) if step.run == run]
        lines.append(Series(f"run {run}", [x for x, _ in steps], [y for _, y in steps]))
    caption = "Objective after each step of each run; within a run it never decreases."
    return line_chart(lines, "step", "objective", caption=caption)


def _select_results(summary: dict[str, Any]) -> dict[str, Any]:
    return {key: summary[key] for key in ("method", "objective", "cycle_error", "pairs", "landscape") if key in summary}
