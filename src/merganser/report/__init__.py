"""What a person looks at: self-contained pages of text, tables and plots."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from merganser.report.page import Page

if TYPE_CHECKING:
    from merganser.report.directories import report

__all__ = ["Page", "report"]


def __getattr__(name: str) -> Any:
    if name == "report":  # it knows every kind of thing there is a page of
        from merganser.report.directories import report

        return report
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
