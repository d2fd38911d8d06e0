"""Imports, pyproject.toml, the lock file and what is installed: four lists that must agree. Needs no network."""

from __future__ import annotations

import ast
import itertools
import re
import sys
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from support.source_trees import SOURCE, nodes

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
#: Distributions whose module has another name.
DISTRIBUTIONS = {"yaml": "pyyaml", "sklearn": "scikit-learn"}
#: Extras for work on the product itself, which its source does not import.
FOR_DEVELOPMENT = {"bench", "test", "docs", "lint"}
#: What the lock leaves to the machine, and what installs the rest.
NOT_LOCKED = {"torch", "pip", "setuptools", "wheel", "merganser"}


class Import(NamedTuple):
    """A third-party module that a file imports; `extra` is the one it names, None for a plain import."""

    file: Path
    module: str
    extra: str | None

    @property
    def distribution(self) -> str:
        return canonicalize_name(DISTRIBUTIONS.get(self.module, self.module))


def find_imports(file: Path) -> Iterator[Import]:
    """Imports of packages that are neither Python's nor ours, as statements or by `require`, which names an extra."""
    found = []
    for node in nodes(file):
        if isinstance(node, ast.Import):
            found += [(alias.name, None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.append((node.module or "", None))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "require":
            module, extra = node.args
            start = module.values[0] if isinstance(module, ast.JoinedStr) else module  # f"pymoo.{name}"
            assert isinstance(start, ast.Constant), f"{file}: require a module by its name"
            assert isinstance(extra, ast.Constant), f"{file}: require names its extra"
            found.append((start.value, extra.value))
    for name, extra in found:
        top = name.split(".")[0]
        if top not in sys.stdlib_module_names and top != "merganser":
            yield Import(file.relative_to(SOURCE), top, extra)


def names(requirements: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(each).name) for each in requirements}


CORE = names(PROJECT["dependencies"])
EXTRAS = {extra: names(each) for extra, each in PROJECT["optional-dependencies"].items()}
LOCKED = dict(re.findall(r"^([a-z0-9-]+)==(\S+) \\$", (ROOT / "requirements-dev.lock").read_text(), re.MULTILINE))


@cache
def imports() -> tuple[Import, ...]:
    return tuple(each for file in sorted(SOURCE.rglob("*.py")) for each in find_imports(file))


def test_every_import_is_declared() -> None:
    optional = set().union(*(EXTRAS[extra] for extra in EXTRAS.keys() - FOR_DEVELOPMENT))
    for each in imports():
        if each.extra is None:
            # Inside functions an optional package is imported after `require`, or for type checkers alone.
            assert each.distribution in CORE | optional, f"{each.file} imports {each.module}, which nobody declares"
        else:
            assert each.extra in EXTRAS, f"{each.file} names the extra {each.extra!r}, which does not exist"
            assert each.distribution in EXTRAS[each.extra] | CORE, (
                f"{each.file} requires {each.module} of the extra {each.extra!r}, which does not bring it"
            )


def test_nothing_is_declared_in_vain() -> None:
    imported = {each.distribution for each in imports()}
    assert CORE - imported == set()
    for extra in EXTRAS.keys() - FOR_DEVELOPMENT:
        assert EXTRAS[extra] - imported - {"merganser"} == set(), extra


def requirements(project: list[str]) -> Iterator[Requirement]:
    for text in project:
        requirement = Requirement(text)
        if canonicalize_name(requirement.name) != "merganser" and (
            requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        ):
            yield requirement


DECLARED = [*PROJECT["dependencies"], *(each for extra in PROJECT["optional-dependencies"].values() for each in extra)]


@pytest.mark.parametrize("requirement", list(requirements(DECLARED)), ids=str)
def test_what_is_installed_and_locked_satisfies_the_project(requirement: Requirement) -> None:
    name = canonicalize_name(requirement.name)
    if name in LOCKED:
        assert requirement.specifier.contains(LOCKED[name], prereleases=True)
    try:
        installed = metadata.version(name)
    except metadata.PackageNotFoundError:
        pytest.skip(f"{name} is not installed")
    assert requirement.specifier.contains(installed, prereleases=True)


def development() -> set[str]:
    """Distributions that `make` installs: the core and the extras of its list, those inside `all` among them."""
    listed = re.search(r"^EXTRAS := (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert listed
    wanted = listed[1].split(",")
    inner = Requirement(PROJECT["optional-dependencies"]["all"][0]).extras
    return CORE.union(*(EXTRAS[extra] for extra in [*wanted, *inner])) - NOT_LOCKED


def test_the_lock_holds_everything_that_development_needs() -> None:
    """Every direct dependency, and all that those need, as far as they are installed here."""
    missing, seen = [], set()
    waiting = sorted(development())
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name in seen or name in NOT_LOCKED:
            continue
        seen.add(name)
        if name not in LOCKED:
            missing.append(name)
            continue
        try:
            needs = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        waiting += [requirement.name for requirement in requirements(needs)]
    assert missing == []


def test_what_is_installed_is_what_is_locked() -> None:
    """Only where `make` took the lock's versions: others are tested by their ranges above."""
    constraints = Path(sys.prefix) / "constraints.txt"
    if not constraints.exists() or LOCKED.items() - dict(re.findall("(.+)==(.+)", constraints.read_text())).items():
        pytest.skip("this environment was not made from the lock")
    found = [each for each in metadata.distributions() if "_vendor" not in str(each.locate_file(""))]  # setuptools' own
    installed = {canonicalize_name(each.name): each.version for each in found}
    other = {name: installed[name] for name, version in LOCKED.items() if installed.get(name, version) != version}
    assert other == {}


def test_every_locked_file_has_a_hash_and_no_host_is_named() -> None:
    text = (ROOT / "requirements-dev.lock").read_text()
    body = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert len(LOCKED) > 50
    assert all(re.fullmatch(r"[a-z0-9-]+==\S+ \\|    --hash=sha256:[0-9a-f]{64}( \\)?", line) for line in body)
    for before, line in itertools.pairwise(body):
        assert "==" not in before or "--hash" in line, f"{before} has no hash"
    assert "://" not in text
    assert LOCKED.keys() & NOT_LOCKED == set()
