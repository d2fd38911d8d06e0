"""Objects with an HTML representation for notebooks."""

from __future__ import annotations

from importlib import import_module


class Shown:
    """An object that notebooks display like the reports, with the same tables and charts."""

    def _repr_html_(self) -> str:
        # Imported by name, since reports import everything they show.
        found: str = import_module("merganser.report.notebooks").render(self)
        return found
