"""Reports for people: self-contained pages of text, tables and plots."""

from __future__ import annotations

from typing import TYPE_CHECKING

from merganser.lazy import exports

__getattr__, __dir__, __all__ = exports(__name__, {"directories": ("report",), "page": ("Page",)})

if TYPE_CHECKING:
    from merganser.report.directories import report as report
    from merganser.report.page import Page as Page
