"""The surface of the package."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

from merganser import align


def test_every_name_resolves_to_no_module() -> None:
    for name in align.__all__:
        assert not isinstance(getattr(align, name), type(sys)), name
    assert set(align.__all__) == set(dir(align))


def test_type_checkers_see_where_every_name_comes_from() -> None:
    tree = ast.parse(Path(align.__file__).read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    seen = {alias.name: node.module for node in imports for alias in node.names}
    for name in align.__all__:
        assert getattr(import_module(str(seen[name])), name) is getattr(align, name)


def test_the_guide_mentions_every_name() -> None:
    guide = (Path(__file__).parents[2] / "docs/alignment.md").read_text(encoding="utf-8")
    assert [name for name in align.__all__ if not re.search(rf"\b{name}\b", guide)] == []


def test_no_module_hides_an_exported_name() -> None:
    modules = {path.stem for path in Path(align.__file__).parent.iterdir()}
    assert not modules & set(align.__all__)


def test_import_is_light() -> None:
    program = "import sys, merganser.align; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
