"""Commands that read no weights do not load what weights need."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.startup import COMMANDS, prepare
from merganser.kernels import tiles
from support.small_gguf import llama, write

#: Run a command as the shell does, then list on the last line of stderr what it loaded.
PROBE = """
import sys
from merganser.cli import main
code = 0
try:
    main()
except SystemExit as end:
    code = end.code
print("loaded:", *sys.modules, file=sys.stderr)
sys.exit(code)
"""
#: Libraries that only run files, weights, terminals with colours and the hub need.
HEAVY = {"pydantic", "torch", "numpy", "scipy", "transformers", "safetensors.torch", "numba", "huggingface_hub", "rich"}
#: What computes and writes, and the readers of checkpoints that are none of these plain directories.
OURS = {
    "merganser.checkpoints.adapter",
    "merganser.checkpoints.dequantised",
    "merganser.checkpoints.distributed",
    "merganser.checkpoints.layouts",
    "merganser.checkpoints.remote.models",
    "merganser.checkpoints.torch_file",
    "merganser.engine.compute",
    "merganser.engine.execute",
    "merganser.engine.export",
    "merganser.engine.processes",
    "merganser.origin.pushing",
}
#: What reads recipes, for commands that are given none.
RECIPES = {"merganser.recipes.loading", "merganser.recipes.planning", "yaml"}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("startup")
    prepare(directory)
    return directory


def loaded(errors: str) -> set[str]:
    return set(errors.splitlines()[-1].split())


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_what_needs_no_tensors_imports_none(words: tuple[str, ...], workspace: Path) -> None:
    done = subprocess.run([sys.executable, "-c", PROBE, *words], cwd=workspace, capture_output=True, text=True)
    assert done.returncode == COMMANDS[words], done.stderr
    unneeded = HEAVY | OURS if words[0] in ("plan", "merge") else HEAVY | OURS | RECIPES
    assert not unneeded & loaded(done.stderr)


def test_merging_imports_what_computes_but_not_torch(workspace: Path) -> None:
    """`tests/engine/test_torchless.py` has the methods, dtypes and options of which this is true."""
    if tiles.library() is None:
        pytest.skip("without the compiled runner, torch merges")
    command = [sys.executable, "-c", PROBE, "merge", "recipe.yml", "merged"]
    done = subprocess.run(command, cwd=workspace, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {"merganser.engine.compute", "merganser.engine.export", "numpy"} <= loaded(done.stderr)
    assert not (HEAVY - {"numpy"}) & loaded(done.stderr)


def test_a_quantised_file_is_shown_without_torch(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    write(tmp_path / "model.gguf", llama(), kind=gguf.GGMLQuantizationType.Q8_0)
    command = [sys.executable, "-c", PROBE, "inspect", "model.gguf"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert "is quantised (16 tensors in Q8_0)" in " ".join(done.stdout.split()), done.stdout + done.stderr
    assert "torch" not in loaded(done.stderr)


def test_modules_that_must_not_be_loaded_exist() -> None:
    assert all(find_spec(name) for name in OURS | RECIPES)
