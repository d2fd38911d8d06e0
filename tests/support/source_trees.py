"""The syntax trees of the product, parsed once for all tests that read its source."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import merganser

SOURCE = Path(merganser.__file__).parent


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Return every node of a file's syntax tree."""
    return tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
