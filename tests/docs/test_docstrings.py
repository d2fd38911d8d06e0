"""Everything public documents its arguments and has an example that runs.

Public is what a package lists in `__all__`. The examples share the names and files of `world`: they read like a
notebook that has a base, two experts and some batches at hand.
"""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from support.world import world
from test_exports import PACKAGES


def public() -> dict[str, Any]:
    """Return every public class and function by its shortest name, but for exceptions."""
    found: dict[str, Any] = {}
    for package in (*PACKAGES, "merganser.checkpoints", "merganser.recipes"):
        module = importlib.import_module(package)
        for name in module.__all__:
            one = getattr(module, name)
            known = any(one is other for other in found.values())
            if callable(one) and not known and not (inspect.isclass(one) and issubclass(one, Exception)):
                found[f"{package}.{name}"] = one
    return found


PUBLIC = public()


def parameters(one: Any) -> list[str]:
    """Return the names of what a caller passes."""
    if inspect.isclass(one) and getattr(one, "_is_protocol", False):
        return []
    return [name for name in inspect.signature(one).parameters if name not in ("self", "cls") and name[0] != "_"]


@pytest.mark.parametrize("name", PUBLIC)
def test_every_argument_is_documented(name: str) -> None:
    one = PUBLIC[name]
    text = inspect.getdoc(one) or ""
    missing = [each for each in parameters(one) if not re.search(rf"^\s+\*{{0,2}}{each}: \S", text, re.MULTILINE)]
    assert text, f"{name} has no docstring"
    assert not missing, f"{name} does not document {', '.join(missing)}"


@pytest.mark.parametrize("name", PUBLIC)
def test_the_example_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = inspect.getdoc(PUBLIC[name]) or ""
    assert "\nExample:\n" in f"\n{text}", f"{name} has no example"
    monkeypatch.chdir(tmp_path)
    example = doctest.DocTestParser().get_doctest(text, world(tmp_path, text), name, None, None)
    assert example.examples, f"the example of {name} has no code"
    printed: list[str] = []
    runner = doctest.DocTestRunner(_Checker(), verbose=False, optionflags=doctest.ELLIPSIS)
    runner.run(example, out=printed.append)
    assert not runner.failures, "".join(printed)


class _Checker(doctest.OutputChecker):
    """Compares what an example shows; one that shows nothing may print anything."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return (not want and "Traceback" not in got) or super().check_output(want, got, optionflags)
