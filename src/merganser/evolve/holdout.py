"""Hold out test items if tasks share questions: a question is a test item in all tasks, or in none.

Translations of a benchmark, or one file asked in two ways, repeat questions in several tasks: a winner searched on one
of them has seen the other. Items therefore belong to groups, and groups are drawn instead of items.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from merganser.errors import InputError


@dataclass(frozen=True)
class Grouped:
    """The group of every item of a task; the last `own_test` items come from the task's test file."""

    groups: tuple[str, ...]
    share: float
    own_test: int = 0


def hold_out(tasks: Mapping[str, Grouped], seed: int) -> dict[str, tuple[int, ...]]:
    """Draw the test items of tasks that share groups.

    Groups of a test file are test items everywhere; groups of the rest of such a task are test items nowhere; a share
    of the others is drawn.

    Args:
        tasks: The tasks whose items have groups.
        seed: The seed of the groups; use the same for every search of a comparison.

    Returns:
        The test items of each task.

    Raises:
        InputError: If a task would have no test items or no others, its test file has groups of the task itself, or two
            tasks have different shares.

    Example:
        >>> hold_out({"en": Grouped(("a", "b"), 0.5), "fr": Grouped(("b", "a"), 0.5)}, 0)["fr"] in [(0,), (1,)]
        True
    """
    files = {name: task for name, task in tasks.items() if task.own_test}
    forced = {group for task in files.values() for group in task.groups[-task.own_test :]}
    kept = {group for task in files.values() for group in task.groups[: -task.own_test]}
    if both := sorted(forced & kept):
        raise InputError(f"group {both[0]!r} is in a test file and among the items of the search")
    drawn_from = [task for task in tasks.values() if not task.own_test]
    if len(shares := {task.share for task in drawn_from}) > 1:
        raise InputError(
            f"tasks that share groups need the same share of test items, not {' and '.join(map(str, sorted(shares)))}"
        )
    free = sorted({group for task in drawn_from for group in task.groups} - forced - kept)
    count = max(1, round(len(free) * shares.pop())) if free else 0
    order = np.random.default_rng(seed).permutation(len(free))
    chosen = forced | {free[place] for place in order[:count]}
    found = {}
    for name, task in tasks.items():
        test = tuple(item for item, group in enumerate(task.groups) if group in chosen)
        if not test or len(test) == len(task.groups):
            which = "all" if test else "none"
            raise InputError(f"task {name!r}: {which} of its groups are test groups; use more groups, or a test file")
        found[name] = test
    return found


def group_connected(tasks: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """Return the names of tasks in sets that share groups, directly or through others."""
    parts: list[tuple[set[str], list[str]]] = []
    for name, groups in tasks.items():
        mine, names = set(groups), [name]
        apart = []
        for others, members in parts:
            if others & mine:
                mine, names = mine | others, members + names
            else:
                apart.append((others, members))
        parts = [*apart, (mine, names)]
    return [names for _, names in parts]
