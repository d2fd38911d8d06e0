"""A short run of the fuzz harness; `make fuzz` is the long one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fuzz import seeds
from fuzz.harness import GOOD, Target, attempt

ROOT = Path(__file__).parents[2]
CASES = 15
TARGETS = (
    *(
        "safetensors",
        "index",
        "config",
        "tokenizer",
        "vocabulary",
        "adapter",
        "modules",
        "gguf",
        "torch",
        "distributed",
        "quantised",
    ),
    *(
        "torch-legacy",
        "recipe",
        "mergekit",
        "library",
        "codes",
        "masks",
        "journal",
        "study",
        "design",
        "runfile",
        "records",
    ),
    *("sweep", "auto", "alignment", "evaluation", "irt", "changes", "lock"),
)


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """Counts and failures, of a process of its own: forking this one with its threads would be a gamble."""
    pytest.importorskip("gguf")
    paths = os.pathsep.join([str(ROOT / "tests"), *(path for path in sys.path if path)])
    command = [sys.executable, "-m", "fuzz", "--cases", str(CASES), "--json"]
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.parametrize("target", TARGETS)
def test_damaged_files_are_read_or_refused(found: dict[str, Any], target: str) -> None:
    assert sum(found["counts"][target].values()) == CASES
    assert found["counts"][target].get("clean"), "not even the valid file is read"
    assert [failure for failure in found["failures"] if failure[0] == target] == []


def test_every_target_is_tried_and_its_seeds_with_it(found: dict[str, Any]) -> None:
    assert set(found["counts"]) == set(TARGETS)
    assert seeds.STORED.keys() <= set(TARGETS)
    assert all(len(stored) < CASES for stored in seeds.STORED.values())


def _spill(directory: Path) -> None:
    from merganser.errors import InputError

    (directory / "left").write_text("x")
    raise InputError("no")


def _reach_out(directory: Path) -> None:
    (directory.parent / "precious.txt").unlink()


def _fail(directory: Path) -> None:
    raise KeyError(directory)


@pytest.mark.parametrize(
    ("run", "verdict"), [(_spill, "leftover"), (_reach_out, "leftover"), (_fail, "unexpected"), (list, "unexpected")]
)
def test_the_harness_notices(tmp_path: Path, run: Any, verdict: str) -> None:
    target = Target("x", {"file": b"abc"}, ("file",), run)
    assert attempt(target, target.case(0, 0), tmp_path)[0] == verdict
    assert verdict not in GOOD
