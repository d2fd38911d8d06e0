"""`merganser merge --quantize`: print how much quantising changes each layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from merganser.cli.output import emit, say
from merganser.report.tables import Table

if TYPE_CHECKING:
    from merganser.engine.merge import Merge


def show_errors(merge: Merge, as_json: bool) -> None:
    """Print the quantisation error of every layer of a merge, beside that of the first model alone."""
    from merganser.engine.requantised import Requantised

    view = merge.sources[0]
    if not isinstance(view, Requantised):
        return
    if as_json:
        layers = [vars(error) for error in view.errors()]
        emit({"event": "quantised", "first": merge.plan.models[1].label, "layers": layers})
        return
    rows = [(error.layer, f"{error.merged:.3%}", f"{error.alone:.3%}") for error in view.errors()]
    say(Table(("layer", "error of the merge", f"of {merge.plan.models[1].label} alone"), rows).text())
