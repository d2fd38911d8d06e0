"""Objects that show themselves in a notebook."""

from __future__ import annotations

from importlib import import_module


class Shown:
    """An object that a notebook shows as the reports do, with the same tables and charts."""

    def _repr_html_(self) -> str:
        # By name, since reports import everything they show.
        found: str = import_module("merganser.report.notebooks").render(self)
        return found
