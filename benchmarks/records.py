"""Stored results: what was measured, by which command, with which seeds, when and on what machine."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.machine import describe

RESULTS = Path(__file__).parent / "results"
#: Options whose value is a place on the machine that measured: left out, or named by what has to be there.
PLACES = ("--data", "--cache", "--json", "--workdir")
PEERS = {
    "--mergekit": "BIN",
    "--fusionbench": "BIN",
    "--py-irt": "PYTHON",
    "--peer": "BIN",
    "--base": "MODEL",
    "--model": "MODEL",
    "--donor": "MODEL",
}


def command() -> str:
    """The command line that is running, without this machine's paths."""
    module = getattr(sys.modules["__main__"], "__spec__", None)
    kept = []
    arguments = iter(part for argument in sys.argv[1:] for part in argument.split("=", 1))
    for argument in arguments:
        if argument in PLACES or argument in PEERS:
            next(arguments, None)
            kept += [argument, PEERS[argument]] if argument in PEERS else []
        else:
            kept.append(argument)
    return f"python -m {shlex.join([module.name if module else Path(sys.argv[0]).stem, *kept])}"


def record(path: Path | None, results: Any, seeds: Iterable[int], added: bool = False) -> None:
    """Write `results` to `path` with everything needed to measure them again; nothing when no path is given.

    `added` says that results of earlier commands are among them, so that those and their machines stay on record.
    """
    if path is None:
        return
    before = json.loads(path.read_text()) if added and path.exists() else {}
    stored = {
        "command": join(before.get("command"), command(), " && "),
        "date": time.strftime("%Y-%m-%d"),
        "machine": join(before.get("machine"), describe(), "; "),
        "seeds": list(seeds),
        "results": results,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.part")
    draft.write_text(json.dumps(stored, indent=1) + "\n")
    draft.replace(path)


def join(before: str | None, now: str, separator: str) -> str:
    """Return the parts of `before` with `now` as the last one, each once."""
    earlier = before.split(separator) if before else []
    return separator.join([*(part for part in earlier if part != now), now])


def stored(name: str) -> dict[str, Any]:
    """The record `benchmarks/results/NAME.json`."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found
