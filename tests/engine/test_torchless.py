"""Ordinary merges do not import torch, and write the bytes that they write with it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import merganser as mg
from merganser.kernels import tiles
from merganser.methods.base import Group
from merganser.methods.registry import registry
from merganser.methods.sparsify import RankedDrop, _by_rank

pytestmark = pytest.mark.skipif(tiles.library() is None, reason="the compiled runner was not built (no C compiler)")

DTYPES = ("bfloat16", "float16", "float32")
#: Small and large, vectors and stacks, one that is cut inside its rows, one without entries.
SHAPES: dict[str, tuple[int, ...]] = {
    "embed.weight": (300, 130), "layers.0.weight": (40, 33), "layers.0.bias": (2100,), "layers.0.conv": (6, 4, 3, 3),
    "experts": (2, 700, 200), "norm": (96,), "scale": (), "empty": (0, 4),
}  # fmt: skip
#: The methods and what they are given besides three models and the base.
METHODS: dict[str, dict[str, Any]] = {
    "linear": {"base": None},
    "ema": {"base": None},
    "passthrough": {"base": None, "models": ["a"]},
    "karcher": {"base": None},
    "multislerp": {},
    "task_arithmetic": {"parameters": {"weight": 0.4}},
    "lines": {},
    "slerp": {"models": ["a"], "parameters": {"t": 0.4}},
    "nuslerp": {"models": ["a", "b"]},
    "ties": {"parameters": {"density": 0.3}},
    "breadcrumbs": {},
    "breadcrumbs_ties": {},
    "dare_linear": {},
    "dare_ties": {},
    "della": {},
    "della_linear": {},
    "model_stock": {},
    "sce": {"parameters": {"select_topk": 0.2}},
    "consensus_ta": {},
    "wise_ft": {"models": ["a"]},
    "ram": {},
    "ram_plus": {},
    "emr": {},
    "magmax": {},
    "wsm": {"base": None},
    "localize_stitch": {},
    "nearswap": {"models": ["a"], "parameters": {"t": 0.01}},
    "arcee_fusion": {"models": ["a"]},
}
#: Runs commands, given as lists of words in JSON, in one process that cannot import torch.
WITHOUT = """
import json, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise ImportError("torch was imported")

if json.loads(sys.argv[2]):
    sys.meta_path.insert(0, Refuse())
from merganser.cli import main
from merganser.engine import execute, processes
processes._WORTH, execute.SPAN = 0, 1 << 14  # models of any size are worth workers, and batches are small
for words in json.loads(sys.argv[1]):
    sys.argv = ["merganser", *words]
    try:
        main()
    except SystemExit as end:
        if end.code:
            sys.exit(end.code)
print("torch" if "torch" in sys.modules else "no torch")
"""


def make_models(directory: Path, dtype: str) -> None:
    """Write a base and three models with integers and a tied name."""
    numbers = np.random.default_rng(0)
    base = {name: numbers.standard_normal(shape) for name, shape in SHAPES.items()}
    for number, label in enumerate(("base", "a", "b", "c")):
        tensors = {
            name: torch.tensor(value + 0.1 * number * numbers.standard_normal(np.shape(value))).to(
                getattr(torch, dtype)
            )
            for name, value in base.items()
        }
        tensors["steps"], tensors["mask"] = torch.tensor([number]), torch.tensor([True, False])
        tensors["positions"] = torch.arange(40_000)
        (directory / label).mkdir(parents=True)
        save_file(tensors, directory / label / "model.safetensors", {"format": "pt", "lm_head.weight": "embed.weight"})
        (directory / label / "config.json").write_text('{"model_type": "llama", "num_hidden_layers": 1}')


def write_recipe(directory: Path, method: str) -> None:
    document = {"method": method, "base": "base", "models": ["a", "b", "c"], "seed": 3, **METHODS.get(method, {})}
    (directory / f"{method}.yml").write_text(json.dumps({key: value for key, value in document.items() if value}))


def run(directory: Path, *commands: list[str], refuse: bool = True) -> subprocess.CompletedProcess[str]:
    """Run commands in a process of their own, which must not import torch if `refuse`."""
    program = [sys.executable, "-c", WITHOUT, json.dumps(commands), json.dumps(refuse)]
    return subprocess.run(program, cwd=directory, capture_output=True, text=True)


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def weights(directory: Path) -> bytes:
    return (directory / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("torchless")
    for dtype in DTYPES:
        make_models(directory / dtype, dtype)
        for method in METHODS:
            write_recipe(directory / dtype, method)
    return directory


@pytest.fixture(scope="module", params=DTYPES)
def merged(models: Path, request: pytest.FixtureRequest) -> Path:
    """Models of one dtype, with the outputs of all methods, made without torch."""
    directory = models / request.param
    done = run(directory, *(["merge", f"{method}.yml", f"out-{method}"] for method in METHODS))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("no torch\n")
    return directory


@pytest.mark.parametrize("method", METHODS)
def test_the_bytes_are_those_of_torch(merged: Path, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(merged)
    made = merged / f"out-{method}"
    if merged.name == "bfloat16":
        mg.run(f"{method}.yml", "compiled", overwrite=True)
        assert contents(merged / "compiled") == contents(made)
    monkeypatch.setattr(tiles, "library", lambda: None)
    mg.run(f"{method}.yml", "torch", overwrite=True)
    assert weights(merged / "torch") == weights(made)


@pytest.mark.parametrize("options", [["--workers", "2"], ["--no-changes"], ["--digest", "xxh3_128"]])
def test_options_need_no_torch(merged: Path, options: list[str]) -> None:
    commands = [
        ["merge", f"{method}.yml", "out", "--overwrite", *options] for method in ("linear", "ties", "dare_ties")
    ]
    done = run(merged, *commands)
    assert done.returncode == 0, done.stdout + done.stderr
    assert weights(merged / "out") == weights(merged / "out-dare_ties")


def test_other_dtypes_need_no_torch(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = models / "float32"
    monkeypatch.chdir(directory)
    for dtype in ("bfloat16", "float16"):
        commands = [
            ["merge", f"{method}.yml", f"{dtype}-{method}", "--dtype", dtype] for method in ("ties", "passthrough")
        ]
        done = run(directory, *commands)
        assert done.returncode == 0, done.stdout + done.stderr
        for method in ("ties", "passthrough"):
            with monkeypatch.context() as patch:
                patch.setattr(tiles, "library", lambda: None)
                mg.run(f"{method}.yml", "torch", dtype=dtype, overwrite=True)
            assert weights(directory / "torch") == weights(directory / f"{dtype}-{method}")


def test_resuming_needs_no_torch(merged: Path) -> None:
    """A finished merge whose journal is cut is continued to the same bytes."""
    killed = "\n".join([
        "import os, sys", "from merganser.engine.writer import CheckpointWriter", "from merganser.cli import main",
        "count = CheckpointWriter.finished_elsewhere", "seen = []",
        "def finish(self, output, done):", "    count(self, output, done); self.commit(); seen.append(output)",
        "    if len(seen) == 4: os._exit(9)",
        "CheckpointWriter.finished_elsewhere = finish",
        "sys.argv = ['merganser', 'merge', 'ties.yml', 'resumed', '--workers', '1']", "main()",
    ])  # fmt: skip
    assert subprocess.run([sys.executable, "-c", killed], cwd=merged, capture_output=True).returncode == 9
    done = run(merged, ["merge", "ties.yml", "resumed", "--resume"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert contents(merged / "resumed") == contents(merged / "out-ties")


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """Models one of which has a NaN in its last tensor."""
    make_models(tmp_path, "bfloat16")
    tensors = dict(mg.open(tmp_path / "b").state_dict())
    tensors = {name: tensor.clone() for name, tensor in tensors.items() if name != "lm_head.weight"}
    tensors["norm"][-1] = torch.nan
    save_file(tensors, tmp_path / "b" / "model.safetensors")
    for method in ("linear", "ties"):
        write_recipe(tmp_path, method)
    return tmp_path


@pytest.mark.parametrize(("method", "workers"), [("linear", "1"), ("ties", "2")])
def test_a_nan_imports_torch_and_is_refused(broken: Path, method: str, workers: str) -> None:
    done = run(broken, ["merge", f"{method}.yml", "out", "--workers", workers], refuse=False)
    assert done.returncode == 2
    assert "b: tensor 'norm' contains NaN" in done.stderr
    assert not [path for path in broken.iterdir() if path.name.startswith("out")]


def test_a_nan_that_is_allowed_is_merged_as_by_torch(broken: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = run(broken, ["merge", "linear.yml", "out", "--allow-nan"], refuse=False)
    assert done.stdout.endswith("\ntorch\n")
    monkeypatch.chdir(broken)
    monkeypatch.setattr(tiles, "library", lambda: None)
    mg.run("linear.yml", "torch", allow_nan=True)
    assert weights(broken / "torch") == weights(broken / "out")


def test_a_rule_that_needs_torch_imports_it(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parent of the workers does, which therefore has it in the end."""
    directory = models / "bfloat16"
    monkeypatch.chdir(directory)
    document: Mapping[str, Any] = {"method": "pcb", "base": "base", "models": ["a", "b"]}
    Path("pcb.yml").write_text(json.dumps(document))
    done = run(directory, ["merge", "pcb.yml", "late", "--workers", "2"], refuse=False)
    assert done.stdout.endswith("\ntorch\n"), done.stdout + done.stderr
    mg.run("pcb.yml", "early", overwrite=True)
    assert weights(directory / "early") == weights(directory / "late")


def test_the_methods_above_are_all_that_can_be_compiled() -> None:
    left = {name for name, rule in registry().items() if rule.reach != "whole" and not rule.statistics} - METHODS.keys()
    assert left == {"pcb"}, "add a method to METHODS, or here if it cannot be recorded"


@pytest.mark.parametrize("n", [1, 2, 7, 96, 4096, 5632, 14336])
@pytest.mark.parametrize("density", [0.0, 0.3, 0.5, 1.0])
def test_tables_of_ranks_are_those_of_torch(n: int, density: float) -> None:
    window = min(0.15, density, 1 - density)
    places = torch.linspace(-1, 1, n, dtype=torch.float64) if n > 1 else torch.zeros(1, dtype=torch.float64)
    chance = (density + window * places).clamp(0, 1).mul(2**16).round().div(2**16)
    bounds, gains = _by_rank(n, density, window, True, 4)
    np.testing.assert_array_equal(bounds, (chance * 2**16 - 2**15).int())
    np.testing.assert_array_equal(gains, torch.where(chance > 0, 1 / chance, 0.0).float())


def test_a_vector_in_several_blocks_is_dropped_as_in_one() -> None:
    """The second half of a vector is thinned as in the whole vector."""
    drop = RankedDrop((0.5,), (0.15,))
    whole = torch.randn(64)
    group = Group("w", (whole,), torch.zeros(64), ("a",), (64,))
    once = drop.thin_(whole.clone(), group, 0, None)
    halves = Halves(whole)
    state = drop.survey(halves)
    parts = [drop.thin_(each.models[0].clone(), each, 0, state) for each in halves]
    assert torch.equal(torch.cat(parts), once)


class Halves:
    """A vector in two blocks."""

    def __init__(self, whole: torch.Tensor) -> None:
        self.shape = tuple(whole.shape)
        self._groups = [
            Group("w", (h,), torch.zeros(32), ("a",), self.shape, 32 * i) for i, h in enumerate(whole.split(32))
        ]

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Any:
        return iter(self._groups)

    def map(self, function: Any, only: int | None = None, stride: int = 1) -> list[Any]:
        return [function(group) for group in self._groups]
