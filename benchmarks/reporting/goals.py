"""Goals that are not met: those of which a section says so, and those of networks that have not been trained."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator

from benchmarks.reporting.parts import Part, Text
from benchmarks.reporting.sections import SECTIONS
from benchmarks.reporting.sections.single_task import GOALS
from benchmarks.zoo.plan import PLAN

NETWORKS = "single_task_"


def missed(parts: Iterable[Part]) -> list[str]:
    """Return the sentences of a section that say *not met*."""
    texts = (" ".join(part.text.split()) for part in parts if isinstance(part, Text))
    return [said for text in texts for said in re.split(r"(?<=[.:]) (?=[A-Z*])", text) if "not met" in said]


def untrained(records: Collection[str]) -> Iterator[str]:
    """Say of every kind of network without a record what its goal is and how long training takes."""
    jobs = {option: job for job in PLAN for option in job.options}
    for section in SECTIONS:
        network = section.record.removeprefix(NETWORKS)
        if section.record in records or not section.record.startswith(NETWORKS) or network not in jobs:
            continue
        goal = f" Goal ({GOALS[network]}): not met." if network in GOALS else ""
        yield (
            f"{section.title}: not measured, because these networks have not been trained, which takes about "
            f"{jobs[network].minutes:.0f} minutes of one core each.{goal}"
        )
