"""The notebooks run, and what they show is kept in them."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "examples" / "notebooks").glob("*.ipynb"))
#: Units of a layer: the notebooks' own networks take seconds to train and to align.
NARROW = 64


def test_there_are_five() -> None:
    assert len(NOTEBOOKS) == 5


def show(code: str, namespace: dict[str, Any]) -> None:
    """Run a cell; what its last line gives is shown as a notebook shows it."""
    tree = ast.parse(code)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), namespace)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), "cell", "eval"), namespace)
        assert value is None or getattr(value, "_repr_html_", value.__repr__)()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("sklearn")
    notebook = nbformat.read(path, as_version=4)
    assert any(cell.get("outputs") for cell in notebook.cells), "run it once and keep what it shows"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("merganser.digits.WIDTH", NARROW)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for cell in notebook.cells:
        if cell.cell_type == "code":
            show(cell.source, namespace)


def test_a_kernel_runs_one(tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("sklearn")
    client = pytest.importorskip("nbclient").NotebookClient
    notebook = nbformat.read(NOTEBOOKS[1], as_version=4)
    narrow = f"import merganser.digits\n\nmerganser.digits.WIDTH = {NARROW}"
    notebook.cells.insert(0, nbformat.v4.new_code_cell(narrow))
    client(notebook, timeout=300, resources={"metadata": {"path": tmp_path}}).execute()
