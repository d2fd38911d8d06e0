"""Runs cases in forked children of a warm process: bounded in time and memory, with an eye on what is left behind.

A case is a target and a number; from them everything follows. Its verdict is one of

- `clean`: the file was accepted; `refused`: an error of the product's own family said why not;
- `unexpected`: any other exception; `hang`: no end within `SECONDS` of work; `memory`: more than `ROOM`;
- `died`: ended by a signal;
- `leftover`: a refusal changed or left something; `silent`: accepted what the reference library rejects.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fuzz.mutations import mutate
from merganser.errors import MerganserError

#: Of the processor for one case, and of the clock until a child that says nothing is given up.
SECONDS, PATIENCE = 8.0, 120.0
ROOM = 1 << 30
BATCH = 40
GOOD = ("clean", "refused")
PRECIOUS = "precious.txt"


class Silent(Exception):
    """Accepted what it should not have."""


class Hang(BaseException):
    """Raised by the alarm; no `except Exception` may swallow it."""


@dataclass(frozen=True)
class Target:
    """A kind of file: a valid set of files, which of them are damaged, and what reads them.

    `run` gets the directory with the files. `stored` are damaged files that once did harm, by name.
    """

    name: str
    files: Mapping[str, bytes]
    damaged: tuple[str, ...]
    run: Callable[[Path], object]
    stored: Mapping[str, Mapping[str, bytes]] = field(default_factory=dict)
    #: What a run may write even though it refuses in the end.
    may_leave: tuple[str, ...] = ()

    def case(self, number: int, seed: int) -> dict[str, bytes]:
        """The files of a case: first the valid ones, then the stored, then damaged ones."""
        files = dict(self.files)
        if number == 0:
            return files
        if number <= len(self.stored):
            return files | dict(list(self.stored.values())[number - 1])
        rng = random.Random(f"{self.name} {number} {seed}")
        name = rng.choice(self.damaged)
        files[name] = mutate(files[name], rng)
        return files


def attempt(target: Target, files: Mapping[str, bytes], root: Path) -> tuple[str, str]:
    """The verdict on one case, and what was said."""
    place = Path(tempfile.mkdtemp(dir=root))
    inside = place / "case"
    try:
        (place / PRECIOUS).write_bytes(b"precious")
        for name, content in files.items():
            (inside / name).parent.mkdir(parents=True, exist_ok=True)
            (inside / name).write_bytes(content)
        before = _state(place)
        verdict, said = _verdict(target, inside)
        now = _state(place)
        allowed = tuple(f"case/{each}" for each in target.may_leave)
        changed = {name for name in before.keys() | now.keys() if before.get(name) != now.get(name)}
        if verdict == "refused" and (left := sorted(name for name in changed if not name.startswith(allowed))):
            return "leftover", f"{left[0]} after: {said}"
        if (place / PRECIOUS).read_bytes() != b"precious":
            return "leftover", f"{PRECIOUS} was changed"
        return verdict, said
    except FileNotFoundError as error:
        return "leftover", f"removed: {error}"
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _verdict(target: Target, directory: Path) -> tuple[str, str]:
    signal.signal(signal.SIGPROF, _alarm)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        target.run(directory)
        return "clean", ""
    except MerganserError as error:
        return "refused", str(error)[:300]
    except Silent as error:
        return "silent", str(error)
    except MemoryError:
        return "memory", "MemoryError"
    except Hang:
        return "hang", f"no end within {SECONDS} s of work"
    except Exception as error:
        at = error.__traceback__
        while at is not None and at.tb_next is not None:
            at = at.tb_next
        where = f"{Path(at.tb_frame.f_code.co_filename).name}:{at.tb_lineno}" if at else "?"
        return "unexpected", f"{type(error).__name__} at {where}: {str(error)[:200]}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _alarm(*_: Any) -> None:
    raise Hang


def _state(place: Path) -> dict[str, tuple[int, bytes]]:
    """Every file by its name, with what it holds."""
    return {
        str(path.relative_to(place)): (path.stat().st_size, path.read_bytes()[:65536])
        for path in sorted(place.rglob("*"))
        if path.is_file()
    }


Result = tuple[str, int, str, str]


def run_cases(targets: Sequence[Target], cases: int, seed: int, jobs: int, start: int = 0) -> Iterator[Result]:
    """Target, number, verdict and message of every case, as they come."""
    root = Path(tempfile.mkdtemp(prefix="fuzz-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    pending = [
        (target, list(range(first, min(first + BATCH, start + cases))))
        for first in range(start, start + cases, BATCH)
        for target in targets
    ]
    running: dict[int, _Child] = {}
    try:
        while pending or running:
            while pending and len(running) < jobs:
                child = _Child(*pending.pop(0), seed, root)
                running[child.process] = child
            for child in list(running.values()):
                yield from child.results()
                if child.over():
                    del running[child.process]
                    yield from child.epitaph()
                    if child.numbers:
                        pending.insert(0, (child.target, child.numbers))
            time.sleep(0.005)
    finally:
        for child in running.values():
            os.kill(child.process, signal.SIGKILL)
        shutil.rmtree(root, ignore_errors=True)


class _Child:
    """A forked process that goes through some cases of a target and reports over a pipe."""

    def __init__(self, target: Target, numbers: list[int], seed: int, root: Path) -> None:
        self.target, self.numbers = target, numbers
        self._pipe, writer = os.pipe()
        self._text = b""
        self._seen = time.monotonic()
        self._status: int | None = None
        self.process = os.fork()
        if self.process == 0:
            os.close(self._pipe)
            try:
                _work(target, numbers, seed, root, writer)
            finally:
                os._exit(0)
        os.close(writer)
        os.set_blocking(self._pipe, False)

    def results(self) -> Iterator[Result]:
        while True:
            try:
                part = os.read(self._pipe, 65536)
            except BlockingIOError:
                break
            if not part:
                break
            self._text += part
            self._seen = time.monotonic()
        *lines, self._text = self._text.split(b"\n")
        for line in lines:
            number, verdict, said = json.loads(line)
            self.numbers.remove(number)
            yield self.target.name, number, verdict, said

    def over(self) -> bool:
        if time.monotonic() - self._seen > PATIENCE:
            os.kill(self.process, signal.SIGKILL)
        process, status = os.waitpid(self.process, os.WNOHANG)
        self._status = status if process else None
        return bool(process)

    def epitaph(self) -> Iterator[Result]:
        yield from self.results()
        os.close(self._pipe)
        if self.numbers:
            verdict = "hang" if time.monotonic() - self._seen > PATIENCE else "died"
            yield self.target.name, self.numbers.pop(0), verdict, f"ended with status {self._status}"


def _work(target: Target, numbers: Sequence[int], seed: int, root: Path, writer: int) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    room = pages * resource.getpagesize() + ROOM
    resource.setrlimit(resource.RLIMIT_AS, (room, room))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number in list(numbers):
        verdict, said = attempt(target, target.case(number, seed), root)
        os.write(writer, json.dumps([number, verdict, said]).encode() + b"\n")
