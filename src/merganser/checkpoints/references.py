"""`model+adapter`: the files, directories and hub ids that a reference names."""

from __future__ import annotations

import os.path
import re
from collections.abc import Callable

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(@[\w./-]+)?")


#: A '+' separates references; in an address it is written %2B.
_URL = re.compile(r"[a-z][a-z0-9]*://[^\s+]+")


def is_remote(reference: str) -> bool:
    """Return whether a reference, without adapters, is a remote address: `https://…`, `s3://…`, `hf://…`."""
    return _URL.fullmatch(reference) is not None


def exists(path: str) -> bool:
    """Return whether a reference leads to something: an existing path, or an address, which is not looked up."""
    return is_remote(path) or os.path.exists(os.path.expanduser(path))


def parts(reference: str, exists: Callable[[str], bool] = exists) -> list[str]:
    """Return the model of a reference and the adapters over it.

    A '+' may also be part of a name. Of all ways to split, chooses the one with the fewest missing parts, then with the
    fewest hub ids, then with the fewest parts.
    """
    words = reference.split("+")
    best: list[tuple[tuple[int, int, int], list[str]]] = [((0, 0, 0), [])]
    for stop in range(1, len(words) + 1):
        ways = []
        for start, ((missing, remote, count), before) in enumerate(best):
            part = "+".join(words[start:stop])
            here = part != "" and exists(part)
            hub = not here and HUB_ID.fullmatch(part) is not None
            lost = 0 if here or hub else stop - start
            ways.append(((missing + lost, remote + hub, count + 1), [*before, part]))
        best.append(min(ways))
    return best[-1][1]
