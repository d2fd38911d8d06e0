"""Commands that read no weights do not load what weights need."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.startup import COMMANDS, prepare

#: Run a command as the shell does, then say on the last line of stderr what it loaded.
PROBE = """
import sys
from merganser.cli import main
code = 0
try:
    main()
except SystemExit as end:
    code = end.code
heavy = ("torch", "numpy", "scipy", "transformers", "safetensors.torch", "numba", "huggingface_hub", "rich")
print("loaded:", *(name for name in heavy if name in sys.modules), file=sys.stderr)
sys.exit(code)
"""


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("startup")
    prepare(directory)
    return directory


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_what_needs_no_tensors_imports_none(words: tuple[str, ...], workspace: Path) -> None:
    done = subprocess.run([sys.executable, "-c", PROBE, *words], cwd=workspace, capture_output=True, text=True)
    assert done.returncode == COMMANDS[words], done.stderr
    assert done.stderr.splitlines()[-1].split() == ["loaded:"], done.stderr


def test_merging_loads_torch_when_it_computes(workspace: Path) -> None:
    command = [sys.executable, "-c", PROBE, "merge", "recipe.yml", "merged"]
    done = subprocess.run(command, cwd=workspace, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "torch" in done.stderr.splitlines()[-1]
