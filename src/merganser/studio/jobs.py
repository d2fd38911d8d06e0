"""Jobs: merganser commands in their own processes. Their state is on disk, so that it survives server and browser."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from merganser.errors import InputError
from merganser.strict_json import parse_json, read_json
from merganser.studio.files import is_locked, read_object

JobStatus = Literal["starting", "running", "done", "failed", "cancelled", "interrupted"]
#: Seconds until a job whose process never started counts as interrupted.
PATIENCE = 30.0
_TAIL = 1 << 16


@dataclass(frozen=True)
class Command:
    """The command of a job: the arguments of `merganser`, and a title.

    `text` is given on standard input. `resumable` says that the command can be resumed; `shown` is the screen and the
    path that show the result.
    """

    kind: str
    title: str
    arguments: list[str]
    cwd: str
    text: str | None = None
    resumable: bool = False
    shown: dict[str, str] | None = None


def words(*positional: str, **options: Any) -> list[str]:
    """Return the words of a command line: `True` is a flag, and what is false or None is left out.

    Example:
        >>> words("plan", "recipe.yml", tensors=False, memory=None)
        ['plan', 'recipe.yml']
    """
    given = [(f"--{name}", value) for name, value in options.items() if value is not None and value is not False]
    return [*positional, *(word for name, value in given for word in ([name] if value is True else [name, str(value)]))]


class Jobs:
    """The jobs of one state directory.

    Args:
        directory: Where their directories are; made if it is not there.

    Example:
        >>> jobs = Jobs(Path("models/.merganser/jobs"))
        >>> job = jobs.start(Command("check", "Check llama", words("inspect", "llama", json=True), "models"))
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    def start(self, command: Command) -> dict[str, Any]:
        """Start a job and return its description."""
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
        directory = self.directory / name
        directory.mkdir(mode=0o700)
        record: dict[str, Any] = asdict(command) | {"created": time.time(), "attempts": 1}
        text = record.pop("text")
        if text is not None:
            (directory / "input.yml").write_text(text, encoding="utf-8")
            record["stdin"] = "input.yml"
        (directory / "job.json").write_text(json.dumps(record), encoding="utf-8")
        self._launch(directory)
        return self.describe(name)

    def _launch(self, directory: Path) -> None:
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
        with (directory / "log.txt").open("ab") as log:
            runner = subprocess.Popen(
                [sys.executable, "-m", "merganser.studio.runner", str(directory)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,
                env=environment,
            )
        (directory / "process").write_text(str(runner.pid), encoding="ascii")

    def list(self, limit: int = 100) -> list[dict[str, Any]]:
        """Return the jobs, the latest first."""
        names = sorted((p.name for p in self.directory.iterdir() if (p / "job.json").is_file()), reverse=True)
        return [self.describe(name) for name in names[:limit]]

    def describe(self, name: str) -> dict[str, Any]:
        """Return what is known of a job: its command, state, progress and how it ended.

        Raises:
            InputError: If there is no such job.
        """
        directory = self._directory(name)
        record: dict[str, Any] = read_json(directory / "job.json")
        ended = read_object(directory / "exit.json")
        events = _read_events(directory / "events.jsonl")
        progress = next((e for e in reversed(events) if "total" in e and "done" in e), None)
        error = next((e["message"] for e in reversed(events) if e.get("event") == "error"), None)
        status = self._status(directory, record, ended)
        return {
            "id": name,
            **record,
            "status": status,
            "code": ended.get("code"),
            "seconds": ended.get("seconds") or round(time.time() - record.get("resumed", record["created"]), 1),
            "progress": progress if status in ("starting", "running") or ended.get("code") else None,
            "error": error if status == "failed" else None,
        }

    def _status(self, directory: Path, record: dict[str, Any], ended: dict[str, Any]) -> JobStatus:
        if ended:
            if ended["code"] == 0:
                return "done"
            return "cancelled" if (directory / "cancelled").exists() else "failed"
        if is_locked(directory / "lock"):
            return "running"
        fresh = time.time() - record.get("resumed", record["created"]) < PATIENCE
        return "starting" if fresh and not (directory / "lock").exists() else "interrupted"

    def output(self, name: str, events: int = 200) -> dict[str, Any]:
        """Return a job with its last events and the end of its log."""
        directory = self._directory(name)
        return self.describe(name) | {
            "events": _read_events(directory / "events.jsonl")[-events:],
            "log": _read_tail(directory / "log.txt"),
        }

    def result(self, name: str) -> Any:
        """Return the last line of JSON that a job has printed."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            lines = (self._directory(name) / "events.jsonl").read_bytes().splitlines()
            return parse_json(lines[-1].decode("utf-8"))
        raise InputError(f"job {name} has no result")

    def cancel(self, name: str) -> dict[str, Any]:
        """Interrupt a job like Ctrl-C; finished work is kept for a resume."""
        directory = self._directory(name)
        if self.describe(name)["status"] not in ("starting", "running"):
            return self.describe(name)
        # The runner looks for the file once it holds the lock: if it does not hold it yet, it starts nothing.
        (directory / "cancelled").touch()
        if is_locked(directory / "lock"):
            with contextlib.suppress(ProcessLookupError, ValueError, FileNotFoundError):
                os.killpg(int((directory / "process").read_text(encoding="ascii")), signal.SIGINT)
        return self.describe(name)

    def resume(self, name: str) -> dict[str, Any]:
        """Run a failed job again, from where it stopped if its command can resume.

        Raises:
            InputError: If it is running or done.
        """
        directory = self._directory(name)
        job = self.describe(name)
        if job["status"] not in ("failed", "cancelled", "interrupted"):
            raise InputError(f"job {name} is {job['status']}: only one that was stopped can go on")
        record = read_json(directory / "job.json")
        record["arguments"] += [word for word in words(resume=record["resumable"]) if word not in record["arguments"]]
        record |= {"attempts": record["attempts"] + 1, "resumed": time.time()}
        for file in ("exit.json", "cancelled", "lock"):
            (directory / file).unlink(missing_ok=True)
        (directory / "job.json").write_text(json.dumps(record), encoding="utf-8")
        self._launch(directory)
        return self.describe(name)

    def remove(self, name: str) -> None:
        """Forget a job that is not running; its output stays."""
        if self.describe(name)["status"] in ("starting", "running"):
            raise InputError(f"job {name} is running: cancel it first")
        shutil.rmtree(self._directory(name))

    def _directory(self, name: str) -> Path:
        directory = self.directory / name
        if not name.replace("-", "").isalnum() or not (directory / "job.json").is_file():
            raise InputError(f"no such job: {name}")
        return directory


def _read_tail(path: Path) -> str:
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL))
        return file.read().decode("utf-8", "replace")
    return ""


def _read_events(path: Path) -> list[dict[str, Any]]:
    """Return the last events, without incomplete or invalid lines."""
    found = []
    for line in _read_tail(path).splitlines():
        with contextlib.suppress(ValueError):
            event = parse_json(line)
            if isinstance(event, dict) and "event" in event:
                found.append(event)
    return found
