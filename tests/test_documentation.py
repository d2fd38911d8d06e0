"""Every public function says what its arguments are."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterator

import pytest

from test_exports import PACKAGES


def functions() -> Iterator[Callable[..., object]]:
    """The functions that packages export, and those of the analyses, whose modules are exported whole."""
    for package in PACKAGES:
        module = importlib.import_module(package)
        for exported in (getattr(module, name) for name in module.__all__):
            found = [exported]
            if inspect.ismodule(exported) and exported.__name__.startswith("merganser.analysis."):
                own = [each for name, each in vars(exported).items() if not name.startswith("_")]
                found = [each for each in own if getattr(each, "__module__", "").startswith(exported.__name__)]
            yield from filter(inspect.isfunction, found)


FUNCTIONS = {f"{function.__module__}.{function.__qualname__}": function for function in functions()}


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_every_argument_is_documented(name: str) -> None:
    text = inspect.getdoc(FUNCTIONS[name]) or ""
    given = inspect.signature(FUNCTIONS[name]).parameters
    assert not [each for each in given if not re.search(rf"^ +\**{each}: \S", text, re.M)]


def test_the_search_finds_functions() -> None:
    assert {"merganser.recipes.running.merge", "merganser.analysis.landscape.segment"} <= FUNCTIONS.keys()
    assert len(FUNCTIONS) > 90
