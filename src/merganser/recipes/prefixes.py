"""One prefix too many or too few: what wrappers leave in the names (`module.`, `_orig_mod.`, `model.`)."""

from __future__ import annotations

import re
from collections.abc import Set

#: What DataParallel and torch.compile put before every name.
WRAPPERS = re.compile(r"((module|_orig_mod)\.)+")


def wrapped(expected: Set[str], given: Set[str]) -> tuple[str, str] | None:
    """A given name and the expected one it stands for, if a prefix put before or taken off the names that differ makes
    them fit: all of one side are then among the other. None if there is no such prefix."""
    lacking, extra = expected - given, given - expected
    if not lacking or not extra:
        return None
    longer = _prefix(lacking, extra)
    if longer is not None:
        return longer
    shorter = _prefix(extra, lacking)
    return (shorter[1], shorter[0]) if shorter is not None else None


def _prefix(long: Set[str], short: Set[str]) -> tuple[str, str] | None:
    """A short name and the long one that is the same behind a prefix, the same one for all."""
    name = max(short, key=lambda each: (len(each), each))
    for found in sorted(each for each in long if each.endswith(f".{name}")):
        prefix = found[: -len(name)]
        put = {prefix + each for each in short}
        if put <= long or long <= put:
            return name, found
    return None
