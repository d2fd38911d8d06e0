"""Merging methods of other packages, found by the entry points they declare.

A package adds its methods with two lines of its `pyproject.toml`; the module it names registers them when imported:

    [project.entry-points."merganser.methods"]
    median = "my_package.median"
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points

GROUP = "merganser.methods"


@functools.cache
def load_plugins() -> Mapping[str, str]:
    """Import every module that installed packages declare in the group `merganser.methods`.

    A package that cannot be imported does not stop merges that do without it.

    Returns:
        What is wrong with the packages that could not be imported, by the name of the package.
    """
    failures = {}
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: (_package(entry), entry.name)):
        try:
            entry.load()
        except Exception as error:  # whatever another package raises
            failures[_package(entry)] = f"{type(error).__name__}: {error}"
    return failures


def _package(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else entry.value
