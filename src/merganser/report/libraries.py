"""The page of an expert library: its base, its experts, their sizes and the energy kept."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from merganser.checkpoints.tensor_names import natural_order
from merganser.errors import CheckpointError
from merganser.library import Library
from merganser.library.budgets import predict_budgets, ranks_by_layer
from merganser.library.manifest import Manifest
from merganser.library.reporting import LayerReport, TensorReport, describe_stored_tensors, sum_by_layer
from merganser.report.charts import Dot, Series, dot_plot, line_chart
from merganser.report.contents import shorten_blocks
from merganser.report.page import Page
from merganser.report.tables import Table
from merganser.units import show_size

_SOUND = {True: "yes", False: "NO", None: "unknown"}


def fill(page: Page, directory: Path, check: bool) -> dict[str, Any]:
    """Fill the page, from the manifest alone if the base is missing; `check` compares every file with its checksum."""
    manifest = Manifest.read(directory)
    library, problem = _try_open(directory)
    page.items([*_describe(manifest, library), *([f"the base could not be opened: {problem}"] if problem else [])])
    _add_experts(page, manifest, library)
    findings = library.verify() if check and library is not None else []
    if findings:
        checked = [[finding.part, _SOUND[finding.sound], finding.message] for finding in findings]
        page.add(Table(["part", "sound", ""], checked, "Files compared with the manifest"))
    page.text("merganser inspect of this directory shows where the experts interfere.")
    return {
        "kind": "library",
        "experts": list(manifest.experts),
        "bytes": {name: record.nbytes for name, record in manifest.experts.items()},
        "ratio": library.size().ratio if library else None,
        "sound": all(finding.sound is not False for finding in findings) if findings else None,
    }


def _describe(manifest: Manifest, library: Library | None) -> Iterator[str]:
    """Yield what the experts are, how they are stored, and how large they are."""
    policy = manifest.policy
    yield f"{len(manifest.experts)} experts of {manifest.base}{' (copied here)' if manifest.base_copied else ''}"
    if policy.codes:
        yield f"{', '.join(policy.codes)} within {policy.value:,.0f} bytes"
    else:
        yield f"factors in {manifest.dtype}, ranks by {policy.kind.replace('_', ' ')} {policy.value:g}"
    yield f"expert files: {show_size(sum(record.nbytes for record in manifest.experts.values()))}"
    if library is not None:
        size = library.size()
        yield f"base and experts: {show_size(size.total)}, {size.ratio:.2f}× the base alone"
    if manifest.pending:
        yield f"NOT FINISHED: {', '.join(manifest.pending)}; build again with the same experts to continue"


def _add_experts(page: Page, manifest: Manifest, library: Library | None) -> None:
    """Add the size of every expert and the energy kept, and what an open library tells about its layers."""
    records = manifest.experts
    kept = [Dot(name, record.energy) for name, record in records.items()]
    page.chart(dot_plot(kept, "energy kept", caption="The share of each expert's energy that its file keeps."))
    rows = [[name, r.nbytes / 2**20, r.energy, r.source, r.sha256[:12]] for name, r in records.items()]
    page.add(Table(["expert", "MiB", "energy kept", "made from", "sha256"], rows, "Experts"))
    if library is not None:
        _add_curves(page, library)
    page.text(
        "Energy kept: the part of ‖expert − base‖² that was stored, over all tensors of an expert together, so that "
        "large changes count most, and vectors, which are stored whole, count too. merganser inspect of the experts "
        "with their base shows the mean over matrices with equal weights instead; for a library, shares of what it "
        "stores."
    )
    if library is not None and manifest.policy.codes and records:
        layers = sum_by_layer(each for name in records for each in describe_stored_tensors(library, name))
        page.add(tabulate_layers(layers))


def _add_curves(page: Page, library: Library) -> None:
    """Add the energy that experts keep at smaller budgets, and the ranks of their layers."""
    points = predict_budgets(library)
    if len(points) > 1:
        sizes = [point["bytes"] / 2**20 for point in points]
        lost = {name: [1 - point["energy"][name] for point in points] for name in library.experts}
        lines = [Series(name, sizes, energies, dots=False) for name, energies in lost.items()]
        caption = (
            "Share of its energy that each expert would lose if the library were built again with a smaller budget."
        )
        page.chart(line_chart(lines, "MiB of all expert files", "energy lost", log_y=True, caption=caption))
    ranks = {name: layers for name, layers in ranks_by_layer(library).items() if layers}
    if ranks:
        order = sorted({layer for layers in ranks.values() for layer in layers}, key=natural_order)
        names = shorten_blocks(order)
        lines = [Series(name, names, [own.get(layer) for layer in order]) for name, own in ranks.items()]
        caption = "Mean rank of the stored factors of each layer."
        page.chart(line_chart(lines, "layer", "rank", include=[0], caption=caption))


def tabulate_layers(layers: Iterable[LayerReport]) -> Table:
    """Return the size and error of every layer, over the experts together."""
    rows = [(each.layer, each, ", ".join(f"{count} {code}" for code, count in each.codes.items())) for each in layers]
    return _tabulate("layer", rows)


def tabulate_tensors(tensors: Iterable[TensorReport]) -> Table:
    """Return the size and error of every tensor of every expert."""
    return _tabulate("tensor", [(f"{each.expert}: {each.tensor}", each, each.code) for each in tensors])


def _tabulate(what: str, rows: Sequence[tuple[str, LayerReport | TensorReport, str]]) -> Table:
    """Return a table of sizes, and of errors if any but those of tensors stored whole is known."""
    known = any(each.lost for _, each, _ in rows)

    def lost(each: LayerReport | TensorReport) -> list[float | None]:
        return [None if each.lost is None else 100 * each.lost] if known else []

    columns = [what, "KiB", "bits per entry", *(["% of energy lost"] if known else []), "stored as"]
    cells = [[name, each.nbytes / 2**10, each.bits, *lost(each), code] for name, each, code in rows]
    return Table(columns, cells, f"Size and error of each {what}")


def _try_open(directory: Path) -> tuple[Library | None, str]:
    try:
        return Library(directory), ""
    except CheckpointError as error:
        return None, str(error)
