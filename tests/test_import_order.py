"""A package imports only from packages above it in the table of docs/architecture.md."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.source_trees import SOURCE, nodes

ROOT = Path(__file__).parents[1]


def layers() -> dict[str, int]:
    """Package or module -> its row in the table."""
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|.*$", (ROOT / "docs/architecture.md").read_text(), re.M)
    return {name: place for place, row in enumerate(rows) for name in re.findall(r"\w+", row)}


LAYERS = layers()


def imported(path: Path) -> Iterator[str]:
    """The packages of this library that a file imports, anywhere in it."""
    for node in nodes(path):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            deeper = node.module.partition(".")[2]
            names = [node.module] if deeper else [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            library, _, rest = name.partition(".")
            if library == "merganser":
                yield rest.partition(".")[0]


def test_every_package_has_its_place() -> None:
    packages = {path.parent.name for path in SOURCE.glob("*/__init__.py")} | {path.stem for path in SOURCE.glob("*.py")}
    assert packages - {"__init__", "__main__"} == set(LAYERS)


@pytest.mark.parametrize("package", sorted(LAYERS))
def test_packages_import_from_above(package: str) -> None:
    files = [*(SOURCE / package).rglob("*.py")] or [SOURCE / f"{package}.py"]
    below = {
        f"{path.relative_to(SOURCE)} imports {other}"
        for path in files
        for other in imported(path)
        if other in LAYERS and LAYERS[other] > LAYERS[package]
    }
    assert not below
