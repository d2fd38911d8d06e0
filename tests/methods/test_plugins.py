"""Methods of another installed package are methods like any other."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

PYPROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "toy-merging"
version = "1.0"
[project.entry-points."merganser.methods"]
toy = "toy_merging"
[tool.setuptools]
py-modules = ["toy_merging"]
"""
MODULE = '''
from dataclasses import dataclass

import torch

from merganser.methods.base import Method
from merganser.methods.parameters import param
from merganser.methods.registry import register


@register
@dataclass(frozen=True)
class Median(Method):
    """θ = median of θ_t, entry by entry, times a factor."""

    name = "toy_median"
    summary = "entry-wise median of the models"
    reach = "elementwise"
    factor: float = param(1.0, "what the median is multiplied by", low=0)

    def merge(self, group, state=None):
        return self.factor * torch.stack(group.models).median(0).values
'''


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package, installed with pip as a user would."""
    source, target = tmp_path_factory.mktemp("toy"), tmp_path_factory.mktemp("site")
    (source / "pyproject.toml").write_text(PYPROJECT)
    (source / "toy_merging.py").write_text(MODULE)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*command, "--target", str(target), str(source)], check=True, capture_output=True)
    return target


def with_site(site: Path) -> dict[str, str]:
    """An environment that has the package."""
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path}


def call(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "merganser", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def models(tmp_path):
    paths = []
    for i in range(3):
        paths.append(tmp_path / f"model{i}.safetensors")
        save_file({"w": torch.randn(4, 3)}, paths[-1])
    return paths


def test_an_installed_package_adds_its_methods(tmp_path, site, models):
    environment = with_site(site)
    rows = json.loads(call(environment, "methods", "--json").stdout)
    assert {"toy_median", "linear"} <= {row["name"] for row in rows}
    assert "times a factor" in call(environment, "methods", "toy_median").stdout
    recipe = tmp_path / "recipe.yml"
    recipe.write_text(
        json.dumps({"method": "toy_median", "models": list(map(str, models)), "parameters": {"factor": 2}})
    )
    done = call(environment, "merge", str(recipe), str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    expected = 2 * torch.stack([load_file(path)["w"] for path in models]).median(0).values
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["w"], expected)
    recipe.write_text(
        json.dumps({"method": "toy_median", "models": list(map(str, models)), "parameters": {"factr": 2}})
    )
    refused = call(environment, "merge", str(recipe), str(tmp_path / "other"))
    assert refused.returncode == 2
    assert "did you mean 'factor'" in refused.stderr
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        ("import nothing_like_this", "ModuleNotFoundError: No module named 'nothing_like_this'"),
        (MODULE.replace("toy_median", "linear"), "InputError: two methods are called 'linear'"),
    ],
)
def test_a_broken_package_is_named_and_stops_nothing_else(tmp_path, site, models, module, reason):
    broken = Path(shutil.copytree(site, tmp_path / "site", ignore=shutil.ignore_patterns("__pycache__")))
    (broken / "toy_merging.py").write_text(module)
    environment = with_site(broken)
    assert f"The plugin toy-merging could not be imported: {reason}" in call(environment, "methods").stdout
    recipe = tmp_path / "recipe.yml"
    recipe.write_text(json.dumps({"method": "linear", "models": list(map(str, models))}))
    assert call(environment, "merge", str(recipe), str(tmp_path / "out")).returncode == 0
    recipe.write_text(json.dumps({"method": "toy_median", "models": list(map(str, models))}))
    refused = call(environment, "merge", str(recipe), str(tmp_path / "other"))
    assert refused.returncode == 2
    assert f"the plugin toy-merging could not be imported ({reason}" in refused.stderr
