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
    errors = view.errors() if isinstance(view, Requantised) else []
    if not errors:
        return  # not quantised, or written before
    if as_json:
        layers = [vars(error) for error in errors]
        emit({"event": "quantised", "first": merge.plan.models[1].label, "layers": layers})
        return
    rows = [
        (error.layer, f"{error.merged:.3%}", "-" if error.alone is None else f"{error.alone:.3%}") for error in errors
    ]
    say(Table(("layer", "error of the merge", f"of {merge.plan.models[1].label} alone"), rows).text())
