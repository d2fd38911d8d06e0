"""What a person looks at: self-contained pages of text, tables and plots."""

from merganser.report.page import Page

__all__ = ["Page"]
