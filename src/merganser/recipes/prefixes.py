"""Prefixes that wrappers add to the names of tensors (`module.`, `_orig_mod.`, `model.`)."""

from __future__ import annotations

import re
from collections.abc import Set

#: Prefixes that DataParallel and torch.compile add to every name.
WRAPPERS = re.compile(r"((module|_orig_mod)\.)+")


def find_prefix(expected: Set[str], given: Set[str]) -> tuple[str, str] | None:
    """Return a given name and the expected name it stands for, if one prefix added or removed makes the names fit.

    Names fit if all names of one side, among those that differ, are then in the other. None if there is no such prefix.
    """
    lacking, extra = expected - given, given - expected
    if not lacking or not extra:
        return None
    longer = _prefix(lacking, extra)
    if longer is not None:
        return longer
    shorter = _prefix(extra, lacking)
    return (shorter[1], shorter[0]) if shorter is not None else None


def _prefix(long: Set[str], short: Set[str]) -> tuple[str, str] | None:
    """Return a short name and the long name that equals it after a prefix, if one prefix serves all."""
    name = max(short, key=lambda each: (len(each), each))
    for found in sorted(each for each in long if each.endswith(f".{name}")):
        prefix = found[: -len(name)]
        put = {prefix + each for each in short}
        if put <= long or long <= put:
            return name, found
    return None
