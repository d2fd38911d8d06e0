"""What packages say they export is there, and type checkers are told the same."""

import ast
import importlib
import inspect
from importlib import metadata
from pathlib import Path

import pytest
import yaml

import merganser

PACKAGES = [
    "merganser",
    "merganser.align",
    "merganser.analysis",
    "merganser.checkpoints",
    "merganser.evaluate",
    "merganser.evolve",
    "merganser.evolve.irt",
    "merganser.routing.baselines",
    "merganser.federated",
    "merganser.interference",
    "merganser.library",
    "merganser.origin",
    "merganser.recipes",
    "merganser.report",
    "merganser.routing",
    "merganser.surgery",
    "merganser.tuning",
]


@pytest.mark.parametrize("package", PACKAGES)
def test_exported_names_resolve_and_are_typed(package: str) -> None:
    module = importlib.import_module(package)
    for name in module.__all__:
        assert getattr(module, name) is not None
    assert set(module.__all__) <= set(dir(module))
    branch = next(node for node in ast.parse(inspect.getsource(module)).body if isinstance(node, ast.If))
    typed = {alias.asname or alias.name for node in branch.body for alias in getattr(node, "names", ())}
    assert typed == set(module.__all__)
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'nothing'"):
        _ = module.nothing


def test_the_version_is_that_of_what_is_installed() -> None:
    assert merganser.__version__ == metadata.version("merganser")


def test_the_citation_names_the_version() -> None:
    citation = yaml.safe_load((Path(__file__).parents[1] / "CITATION.cff").read_text())
    assert str(citation["version"]) == merganser.__version__


def test_experts_is_an_old_name_of_three_packages() -> None:
    for name, now in (("Library", merganser.library.Library), ("interference", merganser.interference.survey)):
        with pytest.warns(DeprecationWarning, match=f"mg.experts.{name} is now mg."):
            assert getattr(merganser.experts, name) is now
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = merganser.experts.nothing
