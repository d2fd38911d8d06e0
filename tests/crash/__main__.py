"""Kill commands at random moments, and fail every operation of the disk: `make crash`.

    python -m crash [--kills 1000] [--seed 0]       (with tests/ in PYTHONPATH)

Prints, for every scenario, how many runs were interrupted, how many of them ended clean (nothing wrong at any moment,
the same bytes in the end, nothing left behind) and how many wrong; exit code 1 if any is wrong.
"""

from __future__ import annotations

import argparse
import errno
import functools
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "evolve"))  # synthetic studies

from crash import merges
from crash.faults import Counting, Failing, Halving, end, in_child, run_in_child
from crash.scenarios import SCENARIOS, Merge, Scenario
from merganser.engine.disk import Disk

FAULTS: dict[str, Callable[[int], Disk]] = {
    "kill": lambda at: Counting(at, end),
    "short write, then kill": Halving,
    "error": Failing,
    "every operation fails from then on": lambda at: Failing(at, dead=True),
    "full disk": lambda at: Failing(at, code=errno.ENOSPC),
}
#: The errors that a failing disk may end in: those that the command line explains.
NAMED = ("MerganserError", "InputError", "CheckpointError")
#: A disk in memory, if there is one: a killed process loses nothing that the system has taken.
_MEMORY = Path("/dev/shm")


class Totals:
    """How many runs were interrupted, and what was wrong with some."""

    def __init__(self) -> None:
        self.tried = 0
        self.wrong: list[str] = []

    def add(self, complaint: str) -> None:
        self.tried += 1
        if complaint:
            self.wrong.append(complaint)

    def show(self, title: str) -> None:
        print(f"{title:<60} tried {self.tried:5}  clean {self.tried - len(self.wrong):5}  wrong {len(self.wrong)}")
        for complaint in self.wrong[:5]:
            print(f"    {complaint}")
        sys.stdout.flush()


def reference(scenario: Scenario, room: Path) -> tuple[str, float]:
    """The result of a run that nobody interrupts, and the seconds it takes in a fresh process."""
    directory = fresh(scenario, room)
    began = time.monotonic()
    code, said = run_in_child(lambda: scenario.work(directory))
    seconds = time.monotonic() - began
    if code:
        raise SystemExit(f"{scenario.name}: does not even work undisturbed: {said}")
    return scenario.result(directory), seconds


def fresh(scenario: Scenario, room: Path) -> Path:
    directory = room / "work"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    scenario.prepare(directory)
    return directory


def complaint(scenario: Scenario, directory: Path, expected: str) -> str:
    """Go on after an interruption, and say what is not as it must be."""
    if found := scenario.wrong(directory, expected):
        return found
    code, said = run_in_child(lambda: scenario.work(directory, again=True))
    if code:
        return f"going on ended with {code}: {said}"
    if scenario.result(directory) != expected:
        return "another result"
    if left := scenario.strays(directory):
        return f"left behind: {left}"
    return ""


def kill_at_random(scenario: Scenario, room: Path, kills: int, numbers: random.Random) -> Totals:
    """One to three kills in a row at moments drawn from the time the work takes, then a run to the end."""
    expected, seconds = reference(scenario, room)
    totals = Totals()
    while totals.tried < kills:
        directory = fresh(scenario, room)
        found = ""
        for turn in range(numbers.choice((1, 1, 2, 3))):
            work = functools.partial(scenario.work, directory, again=turn > 0)
            _kill(work, numbers.uniform(0, seconds))
            found = found or scenario.wrong(directory, expected)
        totals.add(found or complaint(scenario, directory, expected))
    return totals


def _kill(work: Callable[[], object], after: float) -> None:
    child = os.fork()
    if not child:
        try:
            work()
        finally:
            os._exit(0)
    time.sleep(after)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def kill_one_of_two(room: Path, kills: int, numbers: random.Random) -> Totals:
    """Two processes replace one directory by different merges, one of them is killed; then one goes on."""
    scenario = Merge(replace=True)
    expected, seconds = reference(scenario, room)
    directory = fresh(scenario, room)
    merges.merge(directory / "out", others=True, overwrite=True)
    results = {expected, merges.digest(directory / "out")}
    totals = Totals()
    while totals.tried < kills:
        directory = fresh(scenario, room)
        out = directory / "out"
        children = []
        for others in numbers.sample((False, True), 2):
            child = os.fork()
            if not child:
                try:
                    merges.merge(out, overwrite=True, others=others)
                finally:
                    os._exit(0)
            children.append(child)
        time.sleep(numbers.uniform(0, 1.5 * seconds))
        os.kill(children[0], signal.SIGKILL)
        for child in children:
            os.waitpid(child, 0)
        moved = directory / "out.partial" / "replaced"
        whole = [place for place in (out, moved) if merges.is_old(place) or _digest(place) in results]
        in_child(lambda out=out: merges.merge(out, overwrite=True))
        fine = bool(whole) and _digest(out) == expected and not scenario.strays(directory)
        totals.add("" if fine else f"after a kill {[str(place) for place in whole]}, then {os.listdir(directory)}")
    return totals


def _digest(place: Path) -> str:
    return merges.digest(place) if place.is_dir() else ""


def fail_every_operation(scenario: Scenario, room: Path, fault: Callable[[int], Disk], step: int = 1) -> Totals:
    """The n-th operation of the disk goes wrong, for every n, or for every `step`-th."""
    expected, _ = reference(scenario, room)
    operations = list_operations(scenario, room)
    totals = Totals()
    for at, operation in list(enumerate(operations))[::step]:
        directory = fresh(scenario, room)
        code, said = run_in_child(lambda at=at, directory=directory: scenario.work(directory, fault(at)))
        named = code != 1 or said.split()[0] in NAMED
        found = complaint(scenario, directory, expected) if named else f"failed with {said}"
        totals.add(found and f"operation {at}, {operation}: {found}")
    return totals


def list_operations(scenario: Scenario, room: Path) -> list[str]:
    """The operations of the disk in the order they come; in a child, so that this process stays free of threads."""
    directory, counting = fresh(scenario, room), Counting()

    def work() -> None:
        scenario.work(directory, counting)
        (room / "operations").write_text("\n".join(counting.operations))

    assert not in_child(work)
    return (room / "operations").read_text().splitlines()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000, help="random kills over all scenarios")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--room", type=Path, default=_MEMORY if _MEMORY.is_dir() else None, help="where to work")
    options = parser.parse_args()
    numbers = random.Random(options.seed)
    every: list[Totals] = []

    def show(title: str, totals: Totals) -> None:
        totals.show(title)
        every.append(totals)

    with tempfile.TemporaryDirectory(dir=options.room) as temporary:
        room = Path(temporary)
        for scenario in SCENARIOS:
            for title, fault in FAULTS.items() if scenario.faulty else ():
                show(f"{scenario.name}: {title}", fail_every_operation(scenario, room, fault))
        each = max(1, options.kills // (len(SCENARIOS) + 1))
        for scenario in SCENARIOS:
            show(f"{scenario.name}: killed at random", kill_at_random(scenario, room, each, numbers))
        show("two merges at once, one killed at random", kill_one_of_two(room, each, numbers))
    tried, wrong = sum(totals.tried for totals in every), sum(len(totals.wrong) for totals in every)
    print(f"{'in all':<60} tried {tried:5}  clean {tried - wrong:5}  wrong {wrong}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
