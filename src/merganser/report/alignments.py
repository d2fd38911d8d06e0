"""The page of an alignment: similarity of the networks before and after, and which units moved."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from merganser.align.ascent import Step
from merganser.align.permutations import Permutations
from merganser.align.records import Record
from merganser.analysis.similarity import weight_similarity
from merganser.checkpoints import open as open_checkpoint
from merganser.report.charts import Series, line_chart
from merganser.report.contents import contents, facts
from merganser.report.page import Page
from merganser.report.sidecars import read_json
from merganser.report.tables import Table

#: Files that `merganser align` writes besides weights.
PERMUTATIONS, SUMMARY = "permutations.safetensors", "alignment.json"


def fill(page: Page, directory: Path, check: bool) -> dict[str, Any]:
    """Fill the page from the permutations, the aligned networks and the summary of the run, if there is one."""
    record = Record.load(directory / PERMUTATIONS)
    symmetry, moved = record.symmetry, [_moved(permutations) for permutations in record.permutations]
    aligned = {file.stem: file for file in sorted((directory / "aligned").glob("*.safetensors"))}
    summary = read_json(directory / SUMMARY)
    method = f" by {summary['method']}" if "method" in summary else ""
    lines = [f"{len(aligned)} networks aligned{method}: {', '.join(summary.get('models', aligned))}"]
    lines.append(f"{len(symmetry.atoms)} free permutations on {len(symmetry.objective)} tensors")
    lines.append(f"objective {record.objective:.6g}")
    if "cycle_error" in summary:
        lines.append(f"cycle error {summary['cycle_error']:g}")
    page.items(lines)
    page.heading("Similarity")
    if summary.get("pairs"):
        page.add(_pairs(summary))
    else:
        page.add(_apart(aligned))
    trace = record.trace
    if len(trace) > 1:
        page.heading("The search")
        page.chart(_climb(trace))
        steps = [[number, step.run, step.phase, step.objective] for number, step in enumerate(trace, 1)]
        page.add(Table(["step", "run", "phase", "objective"], steps, "Every step"), folded=True)
    page.heading("What moved")
    rows = [[name, atom.size, *(shares[name] for shares in moved)] for name, atom in symmetry.atoms.items()]
    names = summary.get("models") or [f"network {number}" for number in range(1, len(moved) + 1)]
    page.add(Table(["permutation", "units", *names], rows, "Share of the units that moved"))
    merged = directory / "merged.safetensors"
    if merged.is_file():
        page.heading("Their average")
        page.items(facts(contents(open_checkpoint(merged), check=check)))
    return {"kind": "alignment", "models": list(names), "permutations": len(symmetry.atoms), **_kept(summary)}


def _moved(permutations: Permutations) -> dict[str, float]:
    """Return the share of units that each permutation moves."""
    return {name: float(np.mean(index != np.arange(index.shape[-1]))) for name, index in permutations.items()}


def _pairs(summary: dict[str, Any]) -> Table:
    rows = [
        [
            " – ".join(pair["models"]),
            *(pair[key][when] for key in ("cosine", "distance") for when in ("before", "after")),
        ]
        for pair in summary["pairs"]
    ]
    columns = ["networks", "cosine before", "cosine after", "distance before", "distance after"]
    return Table(columns, rows, "Cosine and distance of all weights")


def _apart(aligned: dict[str, Path]) -> Table:
    found = weight_similarity({name: str(path) for name, path in aligned.items()})
    rows = [
        [f"{first} – {second}", found.cosine[a][b], found.distance[a][b]]
        for a, first in enumerate(found.names)
        for b, second in enumerate(found.names)
        if a < b
    ]
    return Table(["networks", "cosine", "distance"], rows, "Cosine and distance of all weights, aligned")


def _climb(trace: Sequence[Step]) -> str:
    lines = []
    for run in dict.fromkeys(step.run for step in trace):
        steps = [(number, step.objective) for number, step in enumerate(trace, 1) if step.run == run]
        lines.append(Series(f"run {run}", [x for x, _ in steps], [y for _, y in steps]))
    caption = "Objective after each step of each run; within a run it never decreases."
    return line_chart(lines, "step", "objective", caption=caption)


def _kept(summary: dict[str, Any]) -> dict[str, Any]:
    return {key: summary[key] for key in ("method", "objective", "cycle_error", "pairs") if key in summary}
