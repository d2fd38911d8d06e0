"""Merging methods of other packages, found by entry points.

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

    A package that cannot be imported does not affect merges that do not use it.

    Returns:
        The import errors, by the name of the package.
    """
    failures = {}
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: (_package(entry), entry.name)):
        try:
            entry.load()
        except Exception as error:  # another package may raise anything
            failures[_package(entry)] = f"{type(error).__name__}: {error}"
    return failures


def _package(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else entry.value
