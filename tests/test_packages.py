"""What is published holds what it should: the wheel, installed apart from the sources, merges two models."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).parents[1]
NEEDED = ("pyproject.toml", "README.md", "LICENSE")
BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the packages are built from, without anything that an earlier build has left."""
    # Importing setuptools here would put the packages it holds on the path of all other tests.
    if not any(found.name == "setuptools" for found in metadata.distributions()):
        pytest.skip("setuptools is not installed")
    place = tmp_path_factory.mktemp("sources")
    leftovers = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.so", "*.pyd", "build")
    shutil.copytree(ROOT / "src", place / "src", ignore=leftovers)
    for name in NEEDED:
        shutil.copy(ROOT / name, place / name)
    return place


def build(sources: Path, kind: str) -> Path:
    done = subprocess.run(
        [sys.executable, "-c", BUILD, kind, str(sources / "dist")], cwd=sources, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return sources / "dist" / done.stdout.split()[-1]


def modules() -> set[str]:
    """Everything of the package that is no cache and not compiled, as the wheel names it."""
    files = {
        path for path in (ROOT / "src" / "merganser").rglob("*") if path.is_file() and "__pycache__" not in path.parts
    }
    return {path.relative_to(ROOT / "src").as_posix() for path in files if path.suffix not in {".so", ".pyd", ".c"}}


def test_the_wheel_holds_the_package_and_merges(sources: Path, tmp_path: Path) -> None:
    wheel = build(sources, "build_wheel")
    held = set(zipfile.ZipFile(wheel).namelist())
    assert modules() <= held
    folders = {name.partition("/")[0].partition("-")[0] for name in held}
    assert folders == {"merganser"}, "the wheel holds something besides the package"
    for kernel in ("_tiles", "_linear_assignment"):
        compiled = [name for name in held if name.startswith(f"merganser/kernels/{kernel}.")]
        assert compiled or shutil.which(os.environ.get("CC", "cc")) is None, f"the compiled {kernel} is missing"

    installed = tmp_path / "installed"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(installed)]
    subprocess.run([*command, str(wheel)], check=True)
    for number, name in enumerate(("a", "b")):
        save_file({"w": torch.full((4, 4), float(number))}, tmp_path / f"{name}.safetensors")
    (tmp_path / "recipe.yml").write_text("method: linear\nmodels: [a.safetensors, b.safetensors]\n")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {
        "PYTHONPATH": str(installed), "PYTHONSAFEPATH": "1"
    }  # fmt: skip
    where = subprocess.run(
        [sys.executable, "-c", "import merganser; print(merganser.__file__)"],
        env=environment, cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert where.stdout.startswith(str(installed))
    subprocess.run(
        [installed / "bin" / "merganser", "merge", "recipe.yml", "out"], env=environment, cwd=tmp_path, check=True
    )
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["w"], torch.full((4, 4), 0.5))


def test_the_source_package_holds_what_the_wheel_is_built_from(sources: Path) -> None:
    with tarfile.open(build(sources, "build_sdist")) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {f"src/{name}" for name in modules()} <= names
    assert {*NEEDED, *(f"src/merganser/kernels/{name}.c" for name in ("tiles", "linear_assignment"))} <= names
